"""Settings of PEFT by which maps and layers differ: its models are read, and ours read there."""

import warnings
from pathlib import Path
from typing import Any, cast

import equinox as eqx
import jax
import numpy as np
import pytest

from tests import published, tiny
from tests.hub import peers
from tests.models import reference
from windlass import adapters
from windlass.adapters.lora import Adapter, LoraGroup
from windlass.checkpoint.fingerprint import named
from windlass.config import read
from windlass.errors import UserError
from windlass.hub import peft
from windlass.program.trainable import choose

CASE = "qwen3"
live = pytest.mark.skipif(not peers.HAS_PEFT, reason="it is what this is compared with")
ATTENTION = ["q_proj", "v_proj", "down_proj"]
SETTINGS: dict[str, dict[str, Any]] = {
    "rank_pattern": {"rank_pattern": {"q_proj": 5, r"layers\.1\.mlp\.down_proj": 2}},
    "alpha_pattern": {
        "rank_pattern": {"v_proj": 2},
        "alpha_pattern": {r"layers\.[02]\.self_attn\.v_proj": 7, "down_proj": 1.5},
    },
    "rslora": {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"q_proj": 3}, "use_rslora": True},
    "layers_to_transform": {"layers_to_transform": [0, 2]},
    "one layer": {"layers_to_transform": 1, "rank_pattern": {"q_proj": 6}},
    "exclude_modules": {"exclude_modules": ["layers.1.self_attn.q_proj", "v_proj"]},
    "excluded by an expression": {"exclude_modules": r".*\.0\..*_proj"},
    "targets by an expression": {"target_modules": r".*\.[12]\.self_attn\.(q|k)_proj"},
    "dora": {"use_dora": True, "layers_to_transform": [1], "rank_pattern": {"q_proj": 2}},
}


def made(case: str = CASE, **settings) -> Any:
    """The reference's model with an adapter of PEFT's that is not at its start."""
    import peft as theirs
    import torch

    config = {"r": 4, "lora_alpha": 6, "target_modules": ATTENTION, **settings}
    found = theirs.get_peft_model(reference.module(case), theirs.LoraConfig(**config))
    torch.manual_seed(0)
    for weight in found.parameters():
        if weight.requires_grad:
            weight.data += 0.1 * torch.randn_like(weight)
    return found


def table() -> dict[str, str]:
    from windlass.models import qwen3

    return qwen3.NAMES


def texts() -> list[np.ndarray]:
    return reference.texts(reference.config(CASE).vocab)[:3]


def base(case: str = CASE) -> Any:
    config = reference.config(case)
    return tiny.filled(tiny.abstract(config), table(), reference.tensors(config))


def section(stored: peft.StoredAdapter) -> Adapter:
    return read(Adapter, stored.settings)


def loaded(folder: Path, case: str = CASE) -> tuple[Adapter, Any]:
    """The settings in a folder, and the model with the adapter there."""
    stored = peft.read(folder)
    adapter = section(stored)
    model = eqx.filter_jit(adapter.adapt)(base(case), names=table(), key=jax.random.key(0))
    arrays = peft.load(stored, model, adapter, table(), None)
    leaves, structure = jax.tree.flatten(eqx.filter(model, eqx.is_array))
    paths = list(named(eqx.filter(model, eqx.is_array)))
    filled = [arrays.get(path, x) for path, x in zip(paths, leaves, strict=True)]
    rest = eqx.filter(model, eqx.is_array, inverse=True)
    return adapter, eqx.combine(structure.unflatten(filled), rest)


@eqx.filter_jit
def _logits(model, batch):
    return model.head.logits(model(batch)[0])


def logits(model) -> np.ndarray:
    return np.asarray(_logits(model, tiny.packed([texts()], length=26)))[0, :24]


@live
@pytest.mark.parametrize("case", SETTINGS)
def test_an_adapter_with_it_gives_the_same_logits_here_and_back_there(case, tmp_path):
    _goes_both_ways(made(**SETTINGS[case]), CASE, tmp_path)


def _goes_both_ways(model, case: str, folder: Path) -> Adapter:
    """Hold an adapter of PEFT's to its logits: read here, merged here, and read there again."""
    import peft as theirs

    model.save_pretrained(folder / "theirs")
    expected = seen(model)
    adapter, ours = loaded(folder / "theirs", case)
    there = np.abs(logits(ours) - expected).max()
    merged = np.abs(logits(eqx.filter_jit(adapters.merged)(ours)) - expected).max()

    published.save_adapter(folder / "ours", ours, adapter, table(), None)
    again = theirs.PeftModel.from_pretrained(reference.module(case), folder / "ours")
    back = np.abs(seen(again) - expected).max()
    print(f"logits differ by {there:.1e} here, {merged:.1e} merged, {back:.1e} back there")
    assert max(there, merged, back) < 1e-5
    assert np.abs(seen(made(case)) - expected).max() > 1e-3
    shapes = [_shapes(folder / name) for name in ("theirs", "ours")]
    assert shapes[0] == shapes[1]
    return adapter


def seen(model) -> np.ndarray:
    """Logits of the reference, one document after the other."""
    import torch

    with torch.no_grad():
        every = [model(torch.from_numpy(one[None, :-1]).long()).logits[0] for one in texts()]
        return torch.cat(every).numpy()


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    from safetensors.numpy import load_file

    return {name: x.shape for name, x in load_file(folder / peft.TENSORS).items()}


def test_beyond_its_rank_a_layer_has_no_effect_and_no_gradient():
    groups = (LoraGroup(match=r"blocks\.1\.attention\.query", rank=2, alpha=3.0),)
    adapter = Adapter(rank=4, groups=groups, targets=("q_proj",), exclude=("layers.2.self_attn.*",))
    model = eqx.filter_jit(adapter.adapt)(base(), names=table(), key=jax.random.key(0))
    lora = model.blocks.kinds[0].attention.query
    assert np.asarray(lora.factors).tolist() == [[2.0] * 4, [1.5, 1.5, 0, 0], [0.0] * 4]
    rough = eqx.tree_at(
        lambda m: m.blocks.kinds[0].attention.query.up.weight, model, replace_fn=lambda x: x + 1
    )
    batch = tiny.packed([texts()], length=26)
    mask = adapters.trained(rough)
    own, rest = eqx.partition(rough, mask)

    @eqx.filter_jit
    def gradient(own):
        return jax.grad(lambda own: tiny.loss(eqx.combine(own, rest), batch))(own)

    found = gradient(own).blocks.kinds[0].attention.query
    used = np.abs(np.asarray(found.down.weight)).sum(axis=1) > 0
    assert used.tolist() == [[True] * 4, [True, True, False, False], [False] * 4]
    assert found.factors is None


@live
def test_names_of_ours_are_written_out_as_those_that_others_know(tmp_path):
    import peft as theirs

    groups = (LoraGroup(match=r"blocks\.1\.attention\.query", rank=2, alpha=3.0),)
    targets = ("blocks.attention.query", "blocks.mlp.*")
    adapter = Adapter(rank=4, groups=groups, targets=targets, exclude=("blocks.mlp.up",))
    model = eqx.filter_jit(adapter.adapt)(base(), names=table(), key=jax.random.key(0))
    rough = lambda x: x + 0.1 if x is not None and x.ndim > 2 else x  # noqa: E731
    own, rest = eqx.partition(model, adapters.trained(model))
    model = eqx.combine(jax.tree.map(rough, own), rest)
    published.save_adapter(tmp_path, model, adapter, table(), None)
    there = theirs.PeftModel.from_pretrained(reference.module(CASE), tmp_path)
    assert np.abs(seen(there) - logits(model)).max() < 1e-5
    assert not any("up_proj" in name for name in _shapes(tmp_path))


REFUSED = {
    "adapter.groups: qproj matches the end of no linear map that is adapted; there are "
    "model.layers.0.self_attn.q_proj, model.layers.1.self_attn.q_proj and "
    "model.layers.2.self_attn.q_proj, for instance": dict(
        groups=(LoraGroup(match="qproj", rank=2),)
    ),
    "adapter.layers has 3, 9; the layers of the model are 0 to 2": dict(layers=(0, 3, 9)),
    "adapter.exclude and adapter.layers leave no linear map to adapt": dict(exclude=("q_proj",)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_chooses_nothing_is_refused(message):
    adapter = Adapter(targets=("q_proj",), **REFUSED[message])
    with pytest.raises(UserError) as refusal:
        adapter.adapt(tiny.abstract(reference.config(CASE)), names=table(), key=jax.random.key(0))
    assert str(refusal.value) == message


def test_groups_that_say_nothing_or_what_cannot_be_are_refused():
    for fields, wrong in (
        (dict(match="q_proj"), "says nothing of q_proj: rank or alpha would"),
        (dict(match="q_proj", rank=0), "rank is 0; it must be 1 or more"),
        (dict(match="q_proj", alpha=-1.0), "alpha is -1.0; it must be above 0"),
        (
            dict(match="(", rank=1),
            "match is (, which is no regular expression: missing ), unterminated subpattern at "
            "position 0",
        ),
    ):
        with pytest.raises(ValueError) as error:
            LoraGroup(**cast(Any, fields))
        assert error.value.args == (wrong,)
    with pytest.raises(ValueError, match="layers is \\[-1\\]; it is a list of numbers, 0 or more"):
        Adapter(layers=(-1,))


WHOLE: dict[str, tuple[str, dict[str, Any]]] = {
    "head and norm": ("qwen3", {"modules_to_save": ["lm_head", "model.norm"]}),
    "embedding": ("qwen3", {"modules_to_save": ["embed_tokens"]}),
    "norms and a map": ("qwen3", {"modules_to_save": ["input_layernorm", "o_proj"]}),
    "tied": ("qwen3, tied", {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}),
}


@live
@pytest.mark.parametrize("name", WHOLE)
def test_modules_to_save_are_read_and_written_whole(name, tmp_path):
    import peft as theirs

    case, settings = WHOLE[name]
    model = made(case, **settings)
    model.save_pretrained(tmp_path / "theirs")
    expected = seen(model)
    adapter, ours = loaded(tmp_path / "theirs", case)
    there = np.abs(logits(ours) - expected).max()
    whole = peft.whole_arrays(ours, adapter.whole, table())
    published.save_adapter(tmp_path / "ours", ours, adapter, table(), None, whole)
    again = theirs.PeftModel.from_pretrained(reference.module(case), tmp_path / "ours")
    back = np.abs(seen(again) - expected).max()
    print(f"{name}: logits differ by {there:.1e} here, {back:.1e} back there")
    assert max(there, back) < 1e-5
    _, once_more = loaded(tmp_path / "ours", case)
    assert np.abs(logits(once_more) - logits(ours)).max() == 0
    arrays = eqx.filter(ours, eqx.is_array)
    assert choose(arrays, None, whole).trained > choose(arrays, None).trained


TOKENS: dict[str, tuple[str, Any, dict[str, tuple[int, ...]]]] = {
    "tied": ("qwen3, tied", [93, 4], {"tokens": (93, 4)}),
    "tied, by names": (
        "qwen3, tied",
        {"embed_tokens": [7, 90], "lm_head": [7, 90]},
        {"tokens": (7, 90)},
    ),
    "embedding": ("qwen3", [93, 4, 11], {"tokens": (93, 4, 11)}),
    "embedding and head": (
        "qwen3",
        {"embed_tokens": [95, 3], "lm_head": [5]},
        {"tokens": (95, 3), "head_tokens": (5,)},
    ),
}


@live
@pytest.mark.parametrize("name", TOKENS)
def test_trained_rows_of_tokens_give_the_same_logits_here_merged_and_back_there(name, tmp_path):
    case, indices, fields = TOKENS[name]
    adapter = _goes_both_ways(made(case, trainable_token_indices=indices), case, tmp_path)
    assert {key: getattr(adapter, key) for key in fields} == fields


def test_only_the_named_rows_are_trained():
    adapter = Adapter(rank=2, tokens=(93, 4), head_tokens=(5,))
    model = eqx.filter_jit(adapter.adapt)(base(), names=table(), key=jax.random.key(0))
    assert np.array_equal(model.embedding.tuned.rows, np.asarray(model.embedding.weight)[[93, 4]])
    mask = choose(eqx.filter(model, eqx.is_array), None)
    width = reference.config(CASE).embed
    without = Adapter(rank=2).adapt(base(), names=table(), key=jax.random.key(0))
    plain = choose(eqx.filter(without, eqx.is_array), None)
    assert mask.trained == plain.trained + 3 * width
    batch = tiny.packed([texts()], length=26)
    own, rest = eqx.partition(model, mask.mask)
    gradient = eqx.filter_jit(
        eqx.filter_grad(lambda own: tiny.loss(eqx.combine(own, rest), batch))
    )(own)
    assert gradient.embedding.weight is None and gradient.output.weight is None
    assert gradient.embedding.tuned.rows.shape == (2, width)
    # The rows of the gradient of whole tables.
    parts = lambda m: (m.embedding.weight, m.output.weight)  # noqa: E731
    every = eqx.filter_jit(jax.grad(lambda x: tiny.loss(eqx.tree_at(parts, without, x), batch)))(
        parts(without)
    )
    rows = every[0][np.array([93, 4])], every[1][np.array([5])]
    assert tiny.apart((gradient.embedding.tuned.rows, gradient.output.tuned.rows), rows) < 1e-5


@pytest.mark.parametrize(("case", "sizes"), [("qwen3, tied", (2, 2, 2)), ("qwen3", (2, 2, 2))])
def test_trained_rows_are_the_same_on_a_mesh(case, sizes):
    adapter = Adapter(rank=2, tokens=(93, 4), head_tokens=() if "tied" in case else (5, 7))
    model = eqx.filter_jit(adapter.adapt)(base(case), names=table(), key=jax.random.key(0))
    rough = lambda x: x + 0.1  # noqa: E731
    model = eqx.tree_at(lambda m: m.embedding.tuned.rows, model, replace_fn=rough)

    @eqx.filter_jit
    def gradient(model, batch):
        own, rest = eqx.partition(model, adapters.trained(model))
        return eqx.filter_value_and_grad(lambda own: tiny.loss(eqx.combine(own, rest), batch))(own)

    expected = gradient(model, tiny.rows(96))
    with tiny.on(sizes) as mesh:
        found = gradient(*tiny.placed(model, tiny.rows(96), mesh))
    assert tiny.apart(found, expected) < 1e-5


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            dict(tokens=(3, 96)),
            "adapter.tokens has 96; the ids of this model are 0 to 95, and a larger model.vocab "
            "adds some",
        ),
        (
            dict(head_tokens=(3,)),
            "adapter.head_tokens is [3]; the head is the embedding (tied), whose rows are "
            "adapter.tokens",
        ),
    ],
)
def test_rows_that_are_not_there_are_refused(fields, message):
    adapter = Adapter(targets=("q_proj",), **fields)
    with pytest.raises(UserError) as refusal:
        eqx.filter_jit(adapter.adapt)(base("qwen3, tied"), names=table(), key=jax.random.key(0))
    assert str(refusal.value) == message


@pytest.mark.parametrize("ids", [(-1, 3), (3, 3)])
def test_ids_that_are_no_ids_are_refused(ids):
    with pytest.raises(ValueError) as error:
        Adapter(tokens=ids)
    assert error.value.args == (
        f"tokens is {[*ids]}; it is a list of token ids, 0 or more, each of them once",
    )


@live
def test_an_embedding_that_parts_from_a_head_it_is_tied_to_is_refused(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that they part
        model = made("qwen3, tied", modules_to_save=["embed_tokens"])
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError) as refusal:
        loaded(tmp_path, "qwen3, tied")
    assert str(refusal.value) == (
        f"1 problem in the adapter in {tmp_path}, made for a model it does not name, beside the "
        "model of this run:\n"
        "  base_model.model.lm_head.weight  is another than embed_tokens, and the head of this "
        "model is its embedding (tied)"
    )


def test_what_is_trained_whole_must_be_there():
    with pytest.raises(UserError) as refusal:
        peft.whole_arrays(tiny.abstract(reference.config(CASE)), ["lm_heat"], table())
    said = str(refusal.value)
    assert said.startswith(
        "adapter.whole: lm_heat matches no weight; did you mean lm_head? there are\n"
    )
