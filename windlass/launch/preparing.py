"""Preparing a launch: a request is completed, or refused, before anything is rented."""

import hashlib
import posixpath
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from windlass import config
from windlass.config import AnyRecipe, Problem, Written, listing, words
from windlass.config.reading import attempt, report
from windlass.config.sections import flat
from windlass.config.text import write
from windlass.devices import selection, slices
from windlass.devices.selection import Device
from windlass.devices.slices import Slice, Slices
from windlass.errors import UserError
from windlass.launch import gpus, installing, uploading
from windlass.launch.description import MOUNT, Bucket, Launch, Upload
from windlass.launch.gpus import GpuHosts
from windlass.run import Run, checks, identity
from windlass.starting import origin

LONGEST_NAME = 40  # of pods and machines, whose names begin with it, there is a limit of 63
# Keys that name files: those of sources can be URLs.
NAMING = ("path", "run", "offsets")
ELSEWHERE = ("model", "start", "adapter", "tokenizer")


def prepare(
    recipe: AnyRecipe,
    overrides: Sequence[str] = (),
    *,
    on: str,
    spot: bool = False,
    region: str | None = None,
    zone: str | None = None,
    bucket: str | None = None,
    name: str | None = None,
    install: str | None = None,
    keep: bool = False,
) -> Launch:
    """Launch of a recipe, checked as far as possible without the machines."""
    requested = gpus.find(on) or slices.find(on)
    kind = gpus.KIND if isinstance(requested, GpuHosts) else "tpu"
    zones = _zones(requested.each, region, zone) if kind == "tpu" else _clouds(region, zone)
    place = None if bucket is None else Bucket.read(bucket)
    _check_durable(requested, place, spot)
    layers = config.load(recipe, overrides)
    merged = layers.merged(kind)
    uploads = {} if place is None else _uploads(merged, place)
    away = _away(merged, place, uploads)
    _refuse(layers.origin, [*away, *_run_folder(merged, place)])
    run = _read(recipe, overrides, requested, kind)
    text = _text(recipe)
    _check_text([text, *overrides])
    name = _name(layers.name, run, [text, *overrides]) if name is None else _valid_name(name)
    keys, added = flat(merged), []
    if place is not None and not keys.get("run.dir"):
        added.append(f"run.dir={place.folder}/{name}")
    if place is not None and requested.hosts > 1 and not keys.get("data.cache"):
        added.append(f"data.cache={place.folder}/cache")
    added += words({key: upload.path for key, upload in uploads.items()})
    package, wheel = installing.package(install, place), None
    if package == installing.UNKNOWN and place is not None:
        wheel = uploading.clone(place)
        package = package if wheel is None else f"{installing.PACKAGE} @ file://{wheel.path}"
    if kind == gpus.KIND and package != installing.UNKNOWN:
        package = package.replace("[tpu]", "[cuda]", 1)
    reads_cloud = any(value.startswith("gs://") for _, value in _path_keys(merged))
    return Launch(
        name=name,
        recipe=Written(_plain(layers.name), text),
        keys=(*overrides, *added),
        slices=requested,
        zones=zones,
        is_narrowed=region is not None or zone is not None,
        bucket=place,
        is_spot=spot,
        is_kept=keep or place is None,
        packages=(package, *(["gcsfs"] if reads_cloud else [])),
        needs_hub=any(key.endswith(".hub") or value == "hub" for key, value in keys.items()),
        uploads=tuple(dict.fromkeys([*uploads.values(), *([wheel] if wheel else [])])),
    )


def _zones(one: Slice, region: str | None, zone: str | None) -> tuple[str, ...]:
    if region is not None and zone is not None:
        raise UserError(f"--zone is {zone}, and --region is {region}; leave one of them out")
    if zone is not None:
        if zone not in one.zones:
            raise UserError(
                f"--zone is {zone}, which has no {one.generation} for everybody; "
                f"{one.name} is in {listing(one.zones, 'and')}"
            )
        return (zone,)
    if region is not None and region not in one.regions:
        raise UserError(
            f"--region is {region}, which has no {one.generation} for everybody; "
            f"{one.name} is in {listing(one.regions, 'and')}"
        )
    return tuple(each for each in one.zones if region in (None, slices.region_of(each)))


def _clouds(region: str | None, zone: str | None) -> tuple[str, ...]:
    """Clouds to rent GPUs on, as SkyPilot names them; none: any."""
    if zone is not None:
        raise UserError(
            f"--zone is {zone}, which is of TPUs; GPUs are on many clouds: --region aws, or "
            "--region gcp/us-central1/us-central1-a, names one"
        )
    return () if region is None else (region,)


def _check_durable(requested: Slices, bucket: Bucket | None, is_spot: bool) -> None:
    if bucket is not None:
        return
    if is_spot:
        raise UserError(
            "--spot needs --bucket gs://NAME: a spot machine is taken away at any time with all "
            "that is on it, and from the bucket the run goes on"
        )
    if requested.hosts > 1:
        raise UserError(
            f"{requested.name} has {requested.hosts} hosts, which need --bucket gs://NAME: each "
            "saves its part of a checkpoint in one folder that all of them see"
        )


def _path_keys(merged: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Keys that name a file or a folder, with their values."""
    data = merged.get("data")
    sections = {name: merged.get(name) for name in ELSEWHERE}
    if isinstance(adapters := merged.get("adapter"), list):
        sections |= {f"adapter.{i}": one for i, one in enumerate(adapters)}
    if isinstance(data, dict):
        sections["data.source"] = data.get("source")
        teacher = data.get("teacher")  # its cache: who wrote that is not needed there
        sections["data.teacher"] = {"path": teacher} if isinstance(teacher, str) else teacher
        mixture = data.get("mixture")
        if isinstance(mixture, list):
            sections |= {f"data.mixture.{i}": source for i, source in enumerate(mixture)}
    objective = merged.get("objective")
    if isinstance(objective, dict):  # whose helpers, such as a teacher, are sections like `start`
        sections |= {f"objective.{name}": x for name, x in objective.items()}
    for section, keys in sections.items():
        for key, value in keys.items() if isinstance(keys, dict) else ():
            if key in NAMING and isinstance(value, str):
                yield f"{section}.{key}", value


def _uploads(merged: dict[str, Any], bucket: Bucket) -> dict[str, Upload]:
    """Uploads of what is on this computer, by the key that names it; a run is not taken along."""
    found = {
        key: uploading.find(value, bucket)
        for key, value in _path_keys(merged)
        if not _is_mounted(value) and "://" not in value and not key.endswith(".run")
    }
    return {key: upload for key, upload in found.items() if upload is not None}


def _away(
    merged: dict[str, Any], bucket: Bucket | None, uploads: Collection[str]
) -> Iterator[Problem]:
    """Problems of paths that are on no machine, and that no upload brings there."""
    for key, value in _path_keys(merged):
        if key in uploads:
            continue
        section = key.rpartition(".")[0]
        is_source = section.startswith("data.") and section != "data.teacher"
        if _is_mounted(value):
            if bucket is None:
                yield key, f"is {value}, and there is no --bucket that would be mounted there"
            continue
        if "://" in value and is_source:
            continue
        there = bucket.folder if bucket is not None else MOUNT
        would = [f"a path under {there}, where --bucket is mounted"]
        if is_source:
            would += ["a URL such as gs://NAME/rows.jsonl", "a data set of the hub"]
        elif section == "data.teacher":
            would.insert(0, "`windlass teach`, which writes it")
        elif section in ("model", "start", "tokenizer") or section.startswith("objective."):
            would += [f"{section}.hub=OWNER/NAME"]
        is_here = bool(uploading.named(value))
        where = "which is on this computer" if is_here else "which is not on this computer"
        if "://" in value:
            where = "which cannot be read as a URL"
        elif is_here and bucket is None:
            would.insert(0, "--bucket gs://NAME, which it is uploaded to")
        yield key, f"is {value}, {where}; {listing(would)} would do"


def _is_mounted(path: str) -> bool:
    """A path that is in the bucket, wherever its `..` lead."""
    return f"{posixpath.normpath(path)}/".startswith(f"{MOUNT}/")


def _run_folder(merged: dict[str, Any], bucket: Bucket | None) -> Iterator[Problem]:
    folder = flat(merged).get("run.dir")
    if bucket is None or not isinstance(folder, str) or "://" in folder:
        return
    if not _is_mounted(folder) or posixpath.normpath(folder) == MOUNT:
        yield (
            "run.dir",
            f"is {folder}, which is not in the bucket; leave it out, or take a folder under "
            f"{bucket.folder}, where the bucket is mounted",
        )


def _read(recipe: AnyRecipe, overrides: Sequence[str], requested: Slices, kind: str) -> Run | None:
    """Run on the requested devices, or a refusal; None where its model is far away."""
    layers = config.load(recipe, overrides)
    merged = layers.merged(kind)
    far = [key for key, value in _path_keys(merged) if not key.startswith("data.") and value]
    if far:
        _, problems = attempt(Run, merged)
        known = [one for one in problems if one[0].split(".")[0] not in ELSEWHERE]
        _refuse(layers.origin, [*layers.problems, *known])
        return None
    layers = origin.load(recipe, overrides)
    device = layers.peek("device", Device) or Device()
    present = {kind: [requested.each.device_kind] * requested.devices}
    try:
        chosen = selection.choose(device, present, {})
    except UserError:
        layers.read(Run, None)  # what is wrong with the keys comes first, and all at once
        raise
    kinds = present[kind][: chosen.count]
    joined = requested.count if kind == "tpu" else 1
    return layers.read(
        Run, kind, checks=[lambda run: checks.problems(run, kind, kinds, slices=joined)]
    )


def _refuse(origin: str, problems: Sequence[Problem]) -> None:
    if problems:
        raise UserError(report(list(problems), origin))


def _name(recipe: str, run: Run | None, texts: Sequence[str]) -> str:
    """Default name of a launch, like that of the run's folder: recipe and digest."""
    of_text = hashlib.sha256("\n".join(texts).encode()).hexdigest()[:8]
    digest = of_text if run is None else identity.digest(run)
    plain = re.sub(r"[^a-z0-9]+", "-", recipe.lower()).strip("-")
    plain = plain if plain[:1].isalpha() else f"run-{plain}".rstrip("-")
    return f"{plain[: LONGEST_NAME - len(digest) - 1].rstrip('-')}-{digest}"


def _check_text(texts: Sequence[str]) -> None:
    """Refuse what no file and no command line of the machines can hold."""
    for text in texts:
        odd = next((c for c in text if c == "\0" or "\ud800" <= c <= "\udfff"), None)
        if odd is not None:
            shown = text[max(0, text.index(odd) - 20) :][:40].encode(errors="replace").decode()
            raise UserError(
                f"{shown!r} holds {odd!a}, which is no character of a text: the machines are sent "
                "UTF-8"
            )


def _plain(recipe: str) -> str:
    """File name of a recipe, valid anywhere: no option or hidden file begins like it."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", recipe).lstrip("-.") or "recipe"


def _valid_name(name: str) -> str:
    if not re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", name) or len(name) > LONGEST_NAME:
        raise UserError(
            f"--name is {name}; it must be at most {LONGEST_NAME} small letters, digits and "
            "hyphens, and begin with a letter: machines are called so"
        )
    return name


def _text(recipe: AnyRecipe) -> str:
    if isinstance(recipe, Written):
        return recipe.text
    if isinstance(recipe, dict):
        return write(recipe)
    return Path(config.find(recipe)).read_text(encoding="utf-8")
