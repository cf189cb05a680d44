"""The model card: what was trained, on what, how far, and how others load it."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

from windlass.checkpoint.store import Identity
from windlass.release.card_data import (
    HARNESS,
    TaskResult,
    data_sets,
    evaluations,
    license_of,
    task_results,
)
from windlass.run_folder import folder as folders
from windlass.telemetry import about, metrics
from windlass.units import number
from windlass.version import __version__

# own: with its adapters as they are, in files that only Windlass reads
# low-bit: the same with packed codes; gguf and gguf-adapter: one file, for llama.cpp
Form = Literal["model", "adapter", "merged", "own", "low-bit", "gguf", "gguf-adapter"]
ADAPTERS_ALONE = ("adapter", "gguf-adapter")
LOSSES = {
    "loss": "training loss",
    "validation_loss": "validation loss",
    "validation_ema_loss": "validation loss of the average",
    "validation_perplexity": "validation perplexity",
}
WEIGHTS = {"last": "the last", "best": "the best", "ema": "the average of the"}


class SavedAt(NamedTuple):
    """The checkpoint that is exported: its step, and the identity that it was written with."""

    step: int
    identity: Identity


SCORED = (
    "An answer is scored by its last token but one: `model(ids[:, :-1]).logits`, where `ids` are "
    "the tokens of the prompt and the answer as they were trained on, with the end."
)


@dataclass(frozen=True)
class Subject:
    """Subject of a model card."""

    run: Path
    recipe: dict[str, Any]  # resolved
    adapters: tuple[Any, ...]  # its sections
    form: Form
    weights: str
    saved: SavedAt
    title: str
    address: str  # what others load: the name on the hub, or the folder's
    base: str | None  # the model it started from, as the hub names it
    based_on: str  # the same, or its folder
    is_known_elsewhere: bool  # `transformers` has its architecture
    license: str | None = None  # as the hub names it; None: that of the model it started from
    has_scores: bool = False  # a reward model: a head of scores in place of the LM head

    @property
    def auto_class(self) -> str:
        """The class of transformers that loads it."""
        return f"AutoModelFor{'SequenceClassification' if self.has_scores else 'CausalLM'}"

    @property
    def part(self) -> str:
        """Part of the state that the weights are: `weights`, or `ema`, their average."""
        is_averaged = self.weights == "best" and self.recipe["train"].get("ema") is not None
        return "ema" if is_averaged or self.weights == "ema" else "weights"

    @property
    def tasks(self) -> list[TaskResult]:
        """Scores of tasks that were measured with these weights."""
        return task_results(self.run, self.saved.step, self.part)

    @property
    def is_gguf(self) -> bool:
        return self.form in ("gguf", "gguf-adapter")

    @property
    def gguf(self) -> str:
        """Name of the GGUF file."""
        return f"{self.title}.gguf"


def card(of: Subject) -> str:
    """README.md: the model card, with the header that the hub reads."""
    parts = [_header(of), f"# {of.title}\n", _opening(of), _facts(of)]
    parts += [_scores(of)] if of.tasks else []
    return "\n".join([*parts, _use(of), _recipe(of)])


def discreet(value: Any) -> Any:
    """Keys of a recipe without what is private: paths of this machine, and logins in addresses."""
    if isinstance(value, dict):
        return {key: discreet(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [discreet(item) for item in value]
    if not isinstance(value, str):
        return value
    if value.startswith(("/", "~", "file:")):
        return Path(value).name
    return re.sub(r"^(\w+://)[^/@]*@", r"\1", value)


def _header(of: Subject) -> str:
    from huggingface_hub import ModelCardData

    known = {"adapter": "peft", "gguf": "gguf", "gguf-adapter": "gguf"}
    library = known.get(of.form, "transformers") if of.is_known_elsewhere else "windlass"
    keys: dict[str, Any] = {"library_name": library}
    if of.is_known_elsewhere:
        keys["pipeline_tag"] = f"text-{'classification' if of.has_scores else 'generation'}"
    if of.base is not None:
        keys["base_model"] = of.base
        keys["base_model_relation"] = _relation(of)
    kinds = [type(one).__module__.rpartition(".")[2] for one in of.adapters]
    keys["tags"] = [
        "windlass",
        *(["gguf"] if of.is_gguf else []),
        *(kinds if of.form in ADAPTERS_ALONE else []),
    ]
    keys |= {"license": of.license} if of.license else license_of(of.run)
    data = data_sets(of.recipe)
    keys |= {"datasets": data} if data else {}
    measured = _measured(of.run / folders.METRICS, of.saved.step)
    prefix = "validation_" if of.part == "weights" else "validation_ema_"
    if results := evaluations(of.tasks, measured, data, prefix):
        keys |= {"model_name": of.title, "eval_results": results}
    return f"---\n{ModelCardData(**keys).to_yaml()}\n---\n"


def _opening(of: Subject) -> str:
    what = {
        "model": "A language model",
        "adapter": "A PEFT adapter",
        "merged": "A language model, with the adapter it was trained by merged into it,",
        "own": "A language model and its adapters, as they are,",
        "low-bit": "A quantized language model, its codes packed,",
        "gguf": "A language model, in a GGUF file for llama.cpp,",
        "gguf-adapter": "A LoRA adapter, in a GGUF file for llama.cpp,",
    }[of.form]
    family = of.recipe["model"].get("family")
    start = f"trained from [{of.base}](https://huggingface.co/{of.base})" if of.base else "trained"
    return f"{what} of the family `{family}`, {start} with Windlass {__version__}.\n"


def _facts(of: Subject) -> str:
    lines = [f"| {name} | {value} |" for name, value in _rows(of)]
    return "\n".join(["## Training\n", "| | |", "|---|---|", *lines, ""])


def _scores(of: Subject) -> str:
    lines = [
        f"| {one.task} | {one.title} | {number(float(one.value))} | "
        f"{'' if one.stderr is None else number(float(one.stderr))} | {one.shots or 0} |"
        for one in of.tasks
    ]
    head = ["| task | metric | value | standard error | shots |", "|---|---|---|---|---|"]
    return "\n".join([f"## Evaluation\n\nBy {HARNESS}.\n", *head, *lines, ""])


def _rows(of: Subject) -> Iterator[tuple[str, str]]:
    train = of.recipe["train"]
    steps = f" of {train['steps']}" if train.get("steps") else ""
    yield "weights", f"{WEIGHTS[of.weights]} weights, at step {of.saved.step}{steps}"
    measured = _measured(of.run / folders.METRICS, of.saved.step)
    if "tokens" in measured:
        yield "tokens trained on", number(measured["tokens"])
    yield from ((title, number(measured[key])) for key, title in LOSSES.items() if key in measured)
    identity = of.saved.identity
    yield "data", f"{identity.get('data', 'unknown')} (hash of the documents)"
    yield "tokenizer", f"{identity.get('tokenizer', 'unknown')}"
    if starts := about.read(of.run / folders.ABOUT):
        device, versions = starts[-1]["chose"]["device"], starts[-1]["versions"]
        yield "trained on", f"{device['count']} × {device['kind']}"
        made_with = ("windlass", "jax", "python")
        yield "versions", ", ".join(f"{name} {versions[name]}" for name in made_with)


def _measured(path: Path, step: int) -> dict[str, Any]:
    """Newest value of each metric up to a step."""
    measured: dict[str, Any] = {}
    if path.exists():
        for record in metrics.read(path):
            if record["step"] <= step:
                measured |= record
    return measured


def _use(of: Subject) -> str:
    parts = ["## Use it\n"]
    if not of.is_known_elsewhere:
        parts.append(
            "`transformers` has no such architecture. `config.json` has the keys of its model in "
            "Windlass, and the tensors in `model.safetensors` are named for its parts. A recipe "
            f"with `model: {{path: {of.address}}}` starts from it.\n"
        )
        return "\n".join(parts)
    if of.is_gguf:
        parts += ["```sh", *_served_by_llama_cpp(of), "```\n"]
        return "\n".join(parts)
    if of.form == "adapter":
        parts += [
            "```python",
            "from peft import PeftModel",
            f"from transformers import {of.auto_class}, AutoTokenizer\n",
            f'tokenizer = AutoTokenizer.from_pretrained("{of.address}")',
            f'base = {of.auto_class}.from_pretrained("{of.based_on}")',
            f'model = PeftModel.from_pretrained(base, "{of.address}")',
            "```\n",
            *_served_beside(of),
        ]
        return "\n".join(parts)
    parts += [
        "```python",
        f"from transformers import {of.auto_class}, AutoTokenizer\n",
        f'tokenizer = AutoTokenizer.from_pretrained("{of.address}")',
        f'model = {of.auto_class}.from_pretrained("{of.address}")',
        "```\n",
    ]
    if of.has_scores:
        return "\n".join([*parts, f"{SCORED}\n"])
    parts += [
        "```sh",
        f"vllm serve '{of.address}'",
        f"windlass train --model '{of.address}' --data chats.jsonl  # goes on from it",
        "```\n",
    ]
    return "\n".join(parts)


def _served_by_llama_cpp(of: Subject) -> list[str]:
    if of.form == "gguf-adapter":
        return [f"llama-cli -m BASE.gguf --lora '{of.gguf}' -p 'Once upon a time'"]
    return [
        f"llama-cli -m '{of.gguf}' -p 'Once upon a time'",
        f"ollama create '{of.title}' -f Modelfile && ollama run '{of.title}'",
    ]


def _relation(of: Subject) -> str:
    """Relation to the model it started from, as the hub names it."""
    return "adapter" if of.form in ADAPTERS_ALONE else "finetune"


def _served_beside(of: Subject) -> list[str]:
    (adapter,) = of.adapters
    if (flags := adapter.vllm_flags()) is None:
        return ["vLLM serves no such adapter; `windlass export --as merged` writes a model.\n"]
    return [
        "```sh",
        f"vllm serve '{of.based_on}' {flags} --lora-modules '{of.title}={of.address}'",
        "```\n",
    ]


def _recipe(of: Subject) -> str:
    text = yaml.safe_dump(discreet(of.recipe), sort_keys=False, allow_unicode=True)
    return (
        "## Recipe\n\n<details><summary>every key, as the run resolved it</summary>\n\n"
        f"```yaml\n{text}```\n\n</details>\n"
    )
