"""Versions of JAX's packages, and their agreement; nothing here imports JAX, which may refuse."""

import re
from collections.abc import Callable, Iterator
from importlib import metadata

CUDA = ("jax-cuda12-plugin", "jax-cuda13-plugin")
# What installs a package in the version that JAX asks for.
INSTALLS = {
    "jaxlib": "`pip install windlass-lm`",
    "libtpu": "`pip install 'windlass-lm[tpu]'`",
    "jax-cuda12-plugin": "`pip install 'windlass-lm[cuda]'`",
}
# What JAX says as it is imported, of a jaxlib that is older, newer or missing.
_REFUSALS = re.compile(r"^jaxlib (is )?version |requires jaxlib")

Installed = Callable[[str], str | None]


def installed(name: str) -> str | None:
    """Version of an installed package, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def cuda_plugin(version: Installed = installed) -> str | None:
    """Name of the CUDA plugin that is installed, or None."""
    return next((name for name in CUDA if version(name)), None)


def disagreements(version: Installed = installed) -> Iterator[tuple[str, str]]:
    """Packages whose version does not go with JAX's: the name, and what would do."""
    wanted = _wanted()
    for name in ("jaxlib", "libtpu", *CUDA):
        has, bounds = version(name), wanted.get(name)
        if name == "jaxlib" and has is None:
            yield name, f"jaxlib is missing; {INSTALLS[name]} installs it"
        elif has is not None and bounds is not None and not fits(has, bounds):
            yield name, _differs(name, has, f"jax {version('jax')} needs {_words(bounds)}")
        elif has is not None and name in CUDA and numbers(has) != numbers(version("jaxlib") or ""):
            yield name, _differs(name, has, f"it works with a jaxlib of {has} alone")


def disagreement(name: str, version: Installed = installed) -> str | None:
    """A package's disagreement with JAX and what would do, or None."""
    return dict(disagreements(version)).get(name)


def refusal(error: Exception) -> str | None:
    """Advice where JAX refuses to be imported for its jaxlib; None of any other error."""
    said = str(error).partition("\n")[0]
    if not _REFUSALS.search(said):
        return None
    return f"JAX does not start: {said.rstrip('.')}; {INSTALLS['jaxlib']} installs one that fits"


def fits(version: str, bounds: str) -> bool:
    """Test of a version against bounds as packages write them: `<=0.10.2,>=0.10.1`, `==0.0.42.*`.

    Numbers alone count: a nightly build has the bounds of its release.
    """
    for operator, bound in re.findall(r"(<=|>=|==|!=|<|>|~=)\s*([\d.]+)", bounds):
        has, other = numbers(version), numbers(bound)
        size = max(len(has), len(other)) if not bound.endswith(".") else len(other)
        has, other = ((x + (0,) * size)[:size] for x in (has, other))
        is_within = {
            **{"<=": has <= other, ">=": has >= other, "<": has < other, ">": has > other},
            **{"==": has == other, "!=": has != other, "~=": has >= other},
        }
        if not is_within[operator]:
            return False
    return True


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: 0.10.2 of `0.10.2.dev1`."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def _wanted() -> dict[str, str]:
    """Bounds that the installed JAX sets, by package; of accelerators they are those of extras."""
    try:
        lines = metadata.requires("jax") or []
    except metadata.PackageNotFoundError:
        return {}
    extras = {"jaxlib": None, "libtpu": "tpu", CUDA[0]: "cuda12", CUDA[1]: "cuda13"}
    found = {}
    for line in lines:
        requirement, _, marker = line.partition(";")
        parts = re.match(r"([\w-]+)(?:\[[^]]*\])?\s*\(?([^)]*)", requirement.strip())
        extra = re.search(r"extra == ['\"]([\w-]+)", marker)
        if parts and parts[1] in extras and extras[parts[1]] == (extra[1] if extra else None):
            found[parts[1]] = parts[2]
    return found


def _differs(name: str, has: str, why: str) -> str:
    install = INSTALLS.get(name, INSTALLS[CUDA[0]])
    return f"{name} {has} is installed, and {why}; {install} installs one that fits"


def _words(bounds: str) -> str:
    """Bounds in words: `0.10.1 to 0.10.2`."""
    parts = dict(re.findall(r"(<=|>=|==)\s*([\w.*]+)", bounds))
    low, high = parts.get(">="), parts.get("<=")
    if low and high:
        return low if low == high else f"{low} to {high}"
    return parts.get("==") or bounds
