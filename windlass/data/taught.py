"""Rows that a teacher has read: its cache beside them, and the refusal of one of other rows."""

from dataclasses import replace
from typing import Any

from windlass import teacher_cache
from windlass.config import tree
from windlass.data import beside
from windlass.data.prepared import Prepared, Tokenized
from windlass.errors import UserError
from windlass.teacher_cache import TeacherCache

# Keys of `data` that decide, of given documents, which rows there are.
KEYS = ("length", "stride", "packing", "lengthy", "validation", "test", "split_seed")


def described(prepared: Tokenized) -> dict[str, Any]:
    """Identity of packed rows, by what decides it, as `teacher.json` has it."""
    data, parts = prepared.data, beside.parts(prepared).items()
    return {
        "tokenizer": prepared.vocabulary.described,
        "documents": ", ".join(corpus.fingerprint[:12] for corpus in prepared.corpora),
        "data.format": str(tree(data.format)),
        **{f"data.{_key(name)}": getattr(data, name) for name in KEYS},
        "rows": {
            name: {"rows": len(part), "fingerprint": part.fingerprint} for name, part in parts
        },
    }


def check(cache: TeacherCache, ours: dict[str, Any]) -> None:
    """Refuse a cache that is of something else, by the name of that."""
    if "rows" in ours and cache.about["documents"] is None:
        raise UserError(
            f"data.teacher.path is {cache.folder}, a cache that was imported with rows of its own; "
            f"data.source: {{kind: teacher, path: {cache.folder}}} reads these"
        )
    for name, value in ours.items():
        theirs = cache.about[name]
        # Of a model of the hub without a revision any commit will do.
        is_same = str(theirs).startswith(value) if name == "teacher" else theirs == value
        if not is_same:
            what = (
                "the rows are others" if name == "rows" else f"it is {theirs} there, {value} here"
            )
            raise UserError(
                f"data.teacher.path is {cache.folder}, whose cache is of another "
                f"{_NAMES.get(name, name)}: {what}. Take the change back, or name another folder "
                "for `windlass teach` to write to"
            )


def joined(prepared: Prepared, *, vocab: int, teacher: str | None = None) -> Prepared:
    """The data of a run with the columns of its teacher.

    `vocab` is the model's, and `teacher` what the recipe's own teacher is, where that is known.
    """
    teaching = prepared.data.teacher
    assert teaching is not None and isinstance(prepared, Tokenized)
    cache = teacher_cache.whole(teaching.folder, "data.teacher.path")
    of_teacher = {} if teacher is None else {"teacher": teacher}
    check(cache, described(prepared) | {"vocab": vocab} | of_teacher | teaching.given)
    added = teaching.columns
    return replace(
        beside.joined(prepared, lambda name: {key: cache.stored(name)[key] for key in added}),
        cache=cache,
    )


def identity(prepared: Prepared) -> dict[str, str]:
    """Identity of the teacher's cache, for a checkpoint to agree on."""
    if prepared.cache is None:
        return {}
    return {"data.teacher": f"a cache with hash {prepared.cache.fingerprint[:12]}"}


_NAMES = {
    "teacher": "data.teacher.model",
    "documents": "text in data.source",
    "rows": "data",
    "vocab": "model.vocab",
    **{name: f"data.teacher.{name}" for name in teacher_cache.USUAL},
}


def _key(name: str) -> str:
    return "longer" if name == "lengthy" else name
