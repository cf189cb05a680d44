"""Parity check of an export: logits, tokens and a chat, elsewhere and in the run."""

import dataclasses
from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from windlass.config import listing
from windlass.data.vocabulary import Vocabulary
from windlass.errors import UserError
from windlass.evaluation.finished_run import FinishedRun
from windlass.hub.chat_template import chat_prompt
from windlass.hub.config import FILE, mapping

ROWS, LENGTH = 2, 64  # of random tokens
# Of the largest logit: two programs that add in another order differ by some 1e-6 of it, while a
# rotary base that is wrong by a hundredth moves logits by 1e-3.
TOLERANCE = 1e-4
TEXTS = ("Once upon a time, there was a Ünïcode word.", "  def f(x):\n\treturn 12345 // x\n")
CHAT = (
    {"role": "user", "content": "What is a windlass?"},
    {"role": "assistant", "content": "A machine that moves heavy weights."},
    {"role": "user", "content": "Who turns it?"},
)


@dataclasses.dataclass(frozen=True)
class LogitDifference:
    """Difference of logits between an export, as others load it, and the run."""

    difference: float  # the largest of two logits
    scale: float  # the largest logit
    made_with: str  # whom it was compared with
    problems: Sequence[str]  # what else differs

    @property
    def good(self) -> bool:
        return self.difference <= TOLERANCE * max(1.0, self.scale) and not self.problems

    def __str__(self) -> str:
        apart = f"logits differ by at most {self.difference:.1e} from those of {self.made_with}"
        limit = TOLERANCE * max(1.0, self.scale)
        parts = [apart] if self.difference <= limit else [f"{apart}; {limit:.1e} would be alike"]
        return "; ".join([*parts, *self.problems])


def check_possible(form: str, source: FinishedRun) -> None:
    """Refuse, before anything is written, what cannot be compared."""
    family = type(source.run.model).__module__.rpartition(".")[2]
    if form in ("own", "low-bit", "gguf-adapter") or not source.has_hugging_face_form:
        why = (
            f"cannot read --as {form}"
            if source.has_hugging_face_form
            else f"has no models like {family}"
        )
        raise UserError(
            f"--check compares with transformers, which {why}; "
            "without --check the export is the same"
        )
    needed = ["transformers", "torch", *({"adapter": ["peft"], "gguf": ["gguf"]}.get(form, []))]
    if missing := [name for name in needed if find_spec(name) is None]:
        raise UserError(
            f"--check compares with {listing(needed, 'and')}, and {listing(missing, 'and')} "
            f"{'is' if len(missing) == 1 else 'are'} not installed; "
            f"`pip install {' '.join(missing)}` does that, and without --check the export is the "
            "same"
        )


def rounded(model: Any, dtype: str) -> Any:
    """Round trip of a model's numbers through a dtype: written, and read back."""

    def round_trip(x):
        if not eqx.is_inexact_array(x):
            return x
        return x.astype(dtype).astype(jnp.float32)

    return jax.tree.map(round_trip, model)


def random_tokens(vocab: int) -> np.ndarray:
    return np.random.default_rng(0).integers(vocab, size=(ROWS, LENGTH)).astype(np.int32)


def logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    """Logits of the run's own model, in float32."""
    batch = {
        "tokens": jnp.asarray(tokens),
        "position": jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape),
        "document": jnp.zeros(tokens.shape, jnp.int32),
    }
    return np.asarray(eqx.filter_jit(lambda model: model.head.logits(model(batch)[0]))(model))


def compare(
    folder: Path,
    base: Path | None,
    tokens: np.ndarray,
    ours: np.ndarray,
    vocabulary: Vocabulary | None,
) -> LogitDifference:
    """Comparison with an export as others load it; `base` is the model of an adapter."""
    theirs = _their_logits(folder, base, tokens)
    names = ["transformers", *(["peft"] if base else [])]
    # A classifier has the scores of the last token alone.
    ours = ours[:, -1] if theirs.ndim < ours.ndim else ours
    return LogitDifference(
        difference=float(np.abs(ours - theirs).max()),
        scale=float(np.abs(ours).max()),
        made_with=listing((f"{name} {metadata.version(name)}" for name in names), "and"),
        problems=[] if vocabulary is None else _other_tokens(folder, vocabulary),
    )


def _their_logits(folder: Path, base: Path | None, tokens: np.ndarray) -> np.ndarray:
    import torch
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    model: Any = getattr(transformers, auto_class(base or folder)).from_pretrained(
        base or folder, dtype=torch.float32, local_files_only=True, attn_implementation="eager"
    )
    if base is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, folder)
    with torch.no_grad():
        # Row by row: a classifier of several needs to know which token is padding.
        rows = [model.eval()(row[None]).logits for row in torch.from_numpy(tokens).long()]
        return torch.cat(rows).float().numpy()


def auto_class(folder: Path) -> str:
    """The class of transformers that loads the model in a folder, by its config.json."""
    (architecture,) = mapping(folder / FILE)["architectures"]
    kind = "SequenceClassification" if architecture.endswith("Classification") else "CausalLM"
    return f"AutoModelFor{kind}"


def _other_tokens(folder: Path, vocabulary: Vocabulary) -> list[str]:
    from transformers import AutoTokenizer

    theirs: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    wrong = [
        f"{text!r} is other tokens there"
        for text in TEXTS
        if theirs(text, add_special_tokens=False).input_ids != vocabulary.encode(text).tolist()
    ]
    if vocabulary.chat is not None:
        text = theirs.apply_chat_template([*CHAT], tokenize=False, add_generation_prompt=True)
        if text != chat_prompt([*CHAT], vocabulary.chat):
            wrong.append("a chat is another text there")
    if theirs.eos_token_id != vocabulary.eos:
        wrong.append(f"a document ends with token {theirs.eos_token_id}, not {vocabulary.eos}")
    return wrong
