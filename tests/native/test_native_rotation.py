"""One native call per layer and step that rotates: what enters and what comes out, by every instruction set, against
float64 in the model's own channels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from given_stores import attend_prompt, attend_step, new_store
from native_code import needs_native
from simulated_storage import rotation
from torch import Tensor

from hf_diffkv.config import DiffKVConfig, Precision
from hf_diffkv.ops.backend import use_backend
from hf_diffkv.ops.softmax import Softmax
from hf_diffkv.store import begin_forward, read_tokens
from hf_diffkv.store.step import refresh

pytestmark = [needs_native, pytest.mark.usefixtures("instructions")]
BOTH = {"rotate": True, "center": True}
# of the norm of a head's output. Queries are not rounded where they are rotated, nor outputs before they are rotated
# back: half precision has the rounding of what it returns, and of 14 bits of queries and weights.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.5e-3, torch.float16: 6e-4}
# of a stored element, beside its rounding: float32 sums of `dim` numbers in another order
SUM_ERROR = 1e-5


def draw(batch: int, heads: int, tokens: int, dim: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Channels have means far from zero, and one of them is large."""
    drawn = torch.randn(batch, heads, tokens, dim, generator=torch.Generator().manual_seed(seed))
    drawn += 2 * torch.sin(torch.arange(dim))
    drawn[..., 1] *= 4
    return drawn.to(dtype)


class Case:
    """A store of one layer that holds a prompt, and the queries, keys and values of the step that follows it."""

    def __init__(
        self,
        dims: tuple[int, int],
        dtype: torch.dtype,
        tokens: int = 90,
        heads: int = 2,
        group: int = 3,
        precisions: tuple[Precision, Precision] = (Precision(8, 4), Precision(4, 2)),
        **fields: bool,
    ) -> None:
        self.dims, self.dtype = dims, dtype
        config = DiffKVConfig(*precisions, window=16, **(fields or BOTH))
        self.store = store = new_store(config, 1, 2, heads, *dims, dtype, torch.device("cpu"))
        store.set_thresholds(0, 1.0, 0.3)
        begin_forward(store, tokens)
        store.padding.append(tokens, None)
        prompt = self.tokens(heads, group, tokens, seed=0)
        with use_backend("reference"):
            attend_prompt(store, 0, *prompt, Softmax(self.scaling))
        self.query, self.key, self.value = self.tokens(heads, group, 1, seed=9)
        begin_forward(store, 1)
        store.padding.append(1, None)

    def tokens(self, heads: int, group: int, tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        key_dim, value_dim = self.dims
        query = draw(2, heads * group, tokens, key_dim, self.dtype, seed)
        key = draw(2, heads, tokens, key_dim, self.dtype, seed + 1)
        return query, key, draw(2, heads, tokens, value_dim, self.dtype, seed + 2)

    @property
    def scaling(self) -> float:
        return self.dims[0] ** -0.5

    def run(self, valid: Tensor | None = None, **options: Any) -> Tensor:
        softmax = Softmax(self.scaling, **options)
        return attend_step(self.store, 0, self.query, self.key, self.value, softmax, valid)

    def entered(self) -> tuple[Tensor, Tensor]:
        # behind the sinks' slots the window is a ring
        sinks = self.store.sink_slots
        slot = sinks + (int(self.store.length[0, 0]) - 1) % (self.store.window_slots - sinks)
        return self.store.window_key[0, :, :, slot].double(), self.store.window_value[0, :, :, slot].double()

    def expected(self, softcap: float | None, sinks: Tensor | None) -> Tensor:
        """Softmax of what the store holds, in float64 and in the model's channels."""
        # the step's own compaction would change what was attended to
        self.store.compaction_due = False
        with use_backend("reference"):
            held = read_tokens(self.store, 0)
        group = self.query.shape[1] // held.keys.shape[1]
        keys, values = (part.double().repeat_interleave(group, 1) for part in (held.keys, held.values))
        logits = self.query.double() @ keys.mT * self.scaling
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits.masked_fill(~held.mask.repeat_interleave(group, 1)[:, :, None], -torch.inf)
        if sinks is not None:
            logits = torch.cat([logits, sinks.double().view(1, -1, 1, 1).expand(2, -1, 1, 1)], -1)
        return logits.softmax(-1)[..., : held.mask.shape[2]] @ values

    def check(self, softcap: float | None = None, sinks: Tensor | None = None) -> None:
        output = self.run(softcap=softcap, sinks=sinks)
        assert output.dtype == self.dtype
        expected = self.expected(softcap, sinks)
        error = (output.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert float(error.max()) <= TOLERANCE[self.dtype]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("dims", [(8, 8), (24, 40), (64, 64), (72, 80), (96, 96), (128, 128), (256, 512)], ids=str)
@pytest.mark.sampled(60)
def test_tokens_enter_rotated_centred_and_rounded_once(dims: tuple[int, int], dtype: torch.dtype) -> None:
    case = Case(dims, dtype)
    offset = case.store.key_offset[0].double()
    assert offset.abs().amax() > 1
    case.run()
    exact = [
        case.key[:, :, 0].double() @ rotation(dims[0]).T - offset,
        case.value[:, :, 0].double() @ rotation(dims[1]).T,
    ]
    for entered, want in zip(case.entered(), exact):
        # half of a step of the dtype
        rounding = want.abs() * torch.finfo(dtype).eps / 2
        assert bool(((entered - want).abs() <= rounding + SUM_ERROR).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [80, 96, 128])
@pytest.mark.sampled(8)
def test_tokens_are_those_of_the_matrix_product(dim: int, dtype: torch.dtype) -> None:
    """The reference adds up in another order, so it may round to the neighbour where an element is close to halfway."""
    case, other = Case((dim, dim), dtype), Case((dim, dim), dtype)
    case.run()
    with use_backend("reference"):
        refresh(other.store)
        other.run()
    for mine, theirs in zip(case.entered(), other.entered()):
        step = theirs.abs() * torch.finfo(dtype).eps
        assert bool(((mine - theirs).abs() <= step).all())
        assert int((mine != theirs).sum()) <= mine.numel() // 100


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("dims", [(8, 8), (24, 40), (64, 64), (72, 80), (96, 96), (128, 128), (256, 512)], ids=str)
@pytest.mark.sampled(8)
def test_outputs_in_the_models_channels(dims: tuple[int, int], dtype: torch.dtype) -> None:
    Case(dims, dtype).check()


@pytest.mark.parametrize("fields", [{"rotate": True, "center": False}, {"rotate": False, "center": True}], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.sampled(8)
def test_only_rotated_or_only_centred(fields: dict, dtype: torch.dtype) -> None:
    Case((64, 64), dtype, **fields).check()


@pytest.mark.parametrize("precisions", [((5, 3), (4, 2)), ((16, 16), (8, 4))], ids=str)
def test_other_precisions(precisions: tuple) -> None:
    Case((80, 80), torch.bfloat16, precisions=tuple(Precision(*bits) for bits in precisions)).check()


@pytest.mark.parametrize("tokens", [9, 3000])
@pytest.mark.sampled(6)
def test_a_window_alone_and_rows_of_several_chunks(tokens: int) -> None:
    torch.set_num_threads(3)
    try:
        Case((64, 64), torch.float32, tokens=tokens, group=1).check()
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("softcap, sinks", [(5.0, None), (None, torch.tensor([0.5, -1.0, 3.0, 0.0, 2.0, 9.0]))])
def test_softcap_and_sinks(softcap: float | None, sinks: Tensor | None) -> None:
    Case((64, 64), torch.float32, rotate=True, center=False).check(softcap, sinks)


def test_tensors_that_are_not_contiguous() -> None:
    case, same = (Case((64, 64), torch.bfloat16) for _ in range(2))
    for name in ("query", "key", "value"):
        apart = getattr(case, name).transpose(1, 3).contiguous().transpose(1, 3)
        assert apart.stride(-1) != 1
        setattr(case, name, apart)
    assert torch.equal(case.run(), same.run())
    assert all(torch.equal(*pair) for pair in zip(case.entered(), same.entered()))


def test_requests_that_are_not_real_stay_as_they_were() -> None:
    case = Case((64, 64), torch.float32)
    before = case.store.window_key[0, 1].clone(), int(case.store.length[0, 1])
    output = case.run(valid=torch.tensor([True, False]))
    assert bool(output[0].any()) and not bool(output[1].any())
    assert torch.equal(case.store.window_key[0, 1], before[0]) and int(case.store.length[0, 1]) == before[1]


def test_elements_that_the_rotation_makes_too_large_are_noted() -> None:
    """4096 in every channel, signs as the rotation's, becomes 32768 in one."""
    row = rotation(64)[0].float() * 8 * 4096
    for name in ("key", "value"):
        case = Case((64, 64), torch.float32, rotate=True, center=False)
        setattr(case, name, row.expand_as(getattr(case, name)).contiguous())
        assert float(getattr(case, name).abs().max()) < case.store.value_limit < 32768
        case.run()
        assert bool(case.store.invalid)
