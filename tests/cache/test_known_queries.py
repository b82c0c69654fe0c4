"""Caches find the moments of their model's queries, and keep using them wherever they are moved."""

from __future__ import annotations

import copy
import logging
import pickle
from pathlib import Path

import pytest
import torch
from hf_diffkv_serving.batching.shapes import AttentionShape
from hf_diffkv_serving.batching.slots import Slots
from test_shared_layers import model_of
from tiny_models import tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from hf_diffkv import DiffKVCache, DiffKVConfig
from hf_diffkv.calibration.queries import keep_queries, moments_on
from hf_diffkv.compat import passing
from hf_diffkv.evaluation.tasks import Document
from hf_diffkv.heads import lookup
from hf_diffkv.heads.hub import QUERIES_NAME
from hf_diffkv.heads.query_moments import QueryMoments, moment_of
from hf_diffkv.heads.sensitivity import Sensitivity

CONFIG = DiffKVConfig("K4V3", "K4V3", alpha_high=0.0, window=8, sinks=0, metadata_bits=16, adaptive_rounding=True)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder."""
    monkeypatch.setenv(lookup.FOLDER_VARIABLE, str(tmp_path / "kept"))
    return tmp_path / "kept"


def documents(count: int = 1) -> list[Document]:
    generator = torch.Generator().manual_seed(0)
    return [Document(str(i), tuple(torch.randint(3, 128, (60,), generator=generator).tolist())) for i in range(count)]


@torch.no_grad()
def continued(model: PreTrainedModel, cache: DiffKVCache, ids: Tensor) -> DiffKVCache:
    model.set_attn_implementation("diffkv")
    for token in ids[0]:
        model(token[None, None], **passing(cache), use_cache=True)
    return cache


def keys(cache: DiffKVCache) -> Tensor:
    return torch.stack([cache.dequantize(layer)[0] for layer in cache.compressed_layers()])


IDS = torch.randint(3, 128, (1, 40), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_moments_are_those_of_the_queries_that_attend() -> None:
    model, given = tiny_model("llama"), documents(2)
    inputs: list[list[Tensor]] = [[] for _ in model.model.layers]
    hooks = [
        layer.self_attn.q_proj.register_forward_hook(lambda module, given, out, place=place: place.append(out))
        for layer, place in zip(model.model.layers, inputs)
    ]
    for document in given:
        model(torch.tensor([document.context]))
    for hook in hooks:
        hook.remove()
    cos, sin = model.model.rotary_emb(torch.zeros(1), torch.arange(60)[None])
    moments = moments_on(model, given)
    assert moments.model_type == "llama" and moments.shapes == ((2, 16),) * len(inputs)
    for triangle, outputs in zip(moments.triangles, inputs):
        queries = [out.view(1, 60, 4, 16).transpose(1, 2) for out in outputs]
        queries = torch.cat([apply_rotary_pos_emb(query, query, cos, sin)[0] for query in queries], dim=2)[0].double()
        # two query heads for each KV head
        rows = queries.unflatten(0, (2, 2)).flatten(1, 2)
        expected = rows.mT @ rows / rows.shape[1]
        # equal numbers of queries from both documents
        scale = expected.diagonal(dim1=1, dim2=2).amax()
        torch.testing.assert_close(moment_of(triangle) / len(given) / scale, expected / scale, rtol=0, atol=2**-7)


def test_caches_find_what_was_kept_of_the_weights(folder: Path) -> None:
    model, other = tiny_model("llama"), tiny_model("llama", seed=2)
    plain = continued(model, DiffKVCache(model, CONFIG), IDS)
    path = keep_queries(moments_on(model, documents()))
    assert path.parent == folder
    caches = {name: DiffKVCache(of, CONFIG) for name, of in {"model": model, "config": model.config}.items()}
    caches["attached"] = DiffKVCache(model.config, CONFIG)
    caches["attached"].attach(model)
    caches["plainly rounded"] = DiffKVCache(model, CONFIG, adaptive_rounding=False)
    caches["many bits"] = DiffKVCache(model, CONFIG, high="K8V4", low="K8V4")
    known = {name: cache.stores.moments is not None for name, cache in caches.items()}
    expected = dict.fromkeys(caches, False) | {"model": True, "attached": True}
    assert known == expected
    assert DiffKVCache(other, CONFIG).stores.moments is None
    one, two = (continued(model, caches[name], IDS) for name in ("model", "attached"))
    assert torch.equal(keys(one), keys(two)) and not torch.equal(keys(one), keys(plain))
    assert one.memory() == plain.memory()
    assert torch.equal(keys(continued(model, caches["config"], IDS)), keys(plain))


def test_a_cache_that_was_begun_goes_on_with_them() -> None:
    model = tiny_model("llama")
    keep_queries(moments_on(model, documents()))
    cache = continued(model, DiffKVCache(model.config, CONFIG), IDS[:, :20])
    before = keys(cache)
    cache.attach(model)
    continued(model, cache, IDS[:, 20:])
    assert all(store.moments is cache.stores.moments is not None for store in cache.stores.all)
    # 12 had left the window
    assert torch.equal(keys(cache)[..., :12, :], before[..., :12, :])


def test_copies_and_files_go_on_alike(tmp_path: Path) -> None:
    model = tiny_model("llama")
    keep_queries(moments_on(model, documents()))
    cache = continued(model, DiffKVCache(model, CONFIG), IDS[:, :20])
    cache.save_pretrained(tmp_path / "saved", model)
    others = {
        "fork": cache.fork(1)[0],
        "copy": copy.deepcopy(cache),
        "pickle": pickle.loads(pickle.dumps(cache)),
        "file": DiffKVCache.from_pretrained(tmp_path / "saved", model),
    }
    assert others["copy"].stores.moments is others["fork"].stores.moments is cache.stores.moments
    assert not any("moment" in path.read_bytes().decode("latin1") for path in (tmp_path / "saved").iterdir())
    expected = keys(continued(model, cache, IDS[:, 20:]))
    for name, other in others.items():
        assert torch.equal(keys(continued(model, other, IDS[:, 20:])), expected), name
    # without them it continues too, rounding each element separately
    plain = DiffKVCache.from_pretrained(tmp_path / "saved", model.config)
    assert not torch.equal(keys(continued(model, plain, IDS[:, 20:])), expected)


def test_a_file_beside_the_model_comes_first(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    moments = moments_on(model, documents())
    moments.save(tmp_path / QUERIES_NAME)
    # it belongs to a configuration
    assert DiffKVCache(model, CONFIG).stores.moments is None
    CONFIG.save_pretrained(tmp_path)
    assert DiffKVCache(model).stores.moments is DiffKVCache(model.config).stores.moments is not None


def test_it_is_said_once_that_measured_heads_lack_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    heads = DiffKVConfig(head_precisions=[["K4V3", "K5V4"]] * 2, adaptive_rounding=True)
    with caplog.at_level(logging.WARNING, "hf_diffkv"):
        for config in (CONFIG, heads, heads):
            DiffKVCache(model, config)
    (record,) = caplog.records
    assert f"calibrate --model {tmp_path}`" in record.getMessage() and "queries" in record.getMessage()


def test_moments_of_another_model_are_refused(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    CONFIG.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    layers, heads = (tiny_model("llama", **{name: 4}) for name in ("num_hidden_layers", "num_key_value_heads"))
    moments_on(layers, documents()).save(tmp_path / QUERIES_NAME)
    with pytest.raises(ValueError, match="are for 4 layers, but 2 layers of this model are compressed"):
        DiffKVCache(model)
    moments_on(heads, documents()).save(tmp_path / QUERIES_NAME)
    cache = DiffKVCache(model)
    with pytest.raises(ValueError, match="are for 4 KV heads of 16 in layer 0, but that layer has 2 of 16"):
        continued(model, cache, IDS)
    shape = AttentionShape(2, 4, 16, 16, torch.float32, torch.device("cpu"))
    slots = Slots(CONFIG, shape, 2, 2, max_tokens=64, max_bytes=1 << 22)
    with pytest.raises(ValueError, match="are for 4 KV heads of 16 in layer 0, but that layer has 2 of 16"):
        slots.use_moments(QueryMoments.load(tmp_path / QUERIES_NAME))


@pytest.mark.parametrize("family", ["gemma3_text", "gemma4_text"])
def test_layers_that_are_compressed_count(family: str) -> None:
    model = tiny_model(family) if family == "gemma3_text" else model_of(family)
    moments = moments_on(model, documents())
    assert len(moments.shapes) == len(DiffKVCache(model, CONFIG).compressed_layers())
    keep_queries(moments)
    assert DiffKVCache(model, CONFIG).stores.moments is not None


@pytest.mark.parametrize("path", sorted(lookup.SHIPPED.glob("*.safetensors")), ids=lambda path: path.stem)
def test_what_ships_can_be_read(path: Path) -> None:
    table = Sensitivity.load(path.with_suffix(".json"))
    assert lookup._shipped()[table.model_digest] == path.with_suffix(".json")
    moments = QueryMoments.load(path)
    assert (moments.model_type, moments.model_digest) == (table.model_type, table.model_digest)
    assert moments.shapes == tuple(shape[:2] for shape in table.shapes)
    assert moments.documents_digest == table.documents_digest
