"""One test for each known fault of the method's first implementation, so that none of them can appear here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from given_stores import attend, begin, new_store, select_rows
from host_reads import HostReads
from test_compressed import left_padding
from tiny_models import tiny_model
from torch import Tensor

from hf_diffkv import DiffKVCache
from hf_diffkv.cache import layer as cache_layer
from hf_diffkv.compat import passing
from hf_diffkv.config import DiffKVConfig, Precision
from hf_diffkv.ops.softmax import Softmax
from hf_diffkv.pages import PagePool
from hf_diffkv.store import Store, check_integrity, payload, read_tokens

CPU = torch.device("cpu")
FULL = Precision(16, 16)


class Run:
    """A store that is given random tokens, and a dense float64 check of every output and sum."""

    def __init__(
        self,
        batch: int = 1,
        layers: int = 1,
        heads: int = 2,
        group: int = 2,
        dim: int = 16,
        dtype=torch.float32,
        **config,
    ) -> None:
        self.config = DiffKVConfig.paper(**config)
        self.heads, self.group, self.dim, self.dtype = heads, group, dim, dtype
        self.store = new_store(self.config, layers, batch, heads, dim, dim, dtype, CPU)
        for layer in range(layers):
            self.store.set_thresholds(layer, self.config.alpha_high, self.config.alpha_low)
        self.generator = torch.Generator().manual_seed(0)

    def draw(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        batch = self.store.batch_size

        def normal(heads: int, scale: float) -> Tensor:
            return (scale * torch.randn(batch, heads, tokens, self.dim, generator=self.generator)).to(self.dtype)

        return normal(self.heads * self.group, 2.0), normal(self.heads, 1.0), normal(self.heads, 1.0)

    def attend(self, layer: int, states: tuple[Tensor, Tensor, Tensor], valid: Tensor | None = None) -> Tensor:
        return attend(self.store, layer, states, Softmax(self.dim**-0.5), valid)

    def steps(self, count: int, check: bool = True) -> None:
        for _ in range(count):
            self.forward(1, check=check)

    def forward(self, tokens: int, valid: Tensor | None = None, check: bool = True) -> list[tuple[Tensor, ...]]:
        """Runs all layers; returns their inputs."""
        store, fed = self.store, []
        before = [read_tokens(store, layer) if store.seen else None for layer in range(store.num_layers)]
        begin(store, tokens, valid)
        for layer in range(store.num_layers):
            states = self.draw(tokens)
            fed.append(states)
            output = self.attend(layer, states, valid)
            if check:
                self.check(layer, before[layer], states, output, valid)
        return fed

    def check(self, layer: int, before: Any, states: tuple[Tensor, ...], output: Tensor, valid: Tensor | None) -> None:
        """Compares output and sums with a dense softmax over what was stored before and the exact new tokens."""
        after = read_tokens(self.store, layer)
        tokens = states[0].shape[2]
        valid = torch.ones(output.shape[0], tokens, dtype=torch.bool) if valid is None else valid
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-7}[self.dtype]
        for row in range(output.shape[0]):
            for head in range(self.heads):
                past_key, past_value = torch.zeros(2, 0, self.dim, dtype=torch.float64)
                past_score, stored = torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.bool)
                if before is not None:
                    stored = before.mask[row, head]
                    past_key, past_value = before.keys[row, head].double(), before.values[row, head].double()
                    past_score = before.score[row, head].double()
                key = torch.cat([past_key, states[1][row, head].double()])
                value = torch.cat([past_value, states[2][row, head].double()])
                present = torch.cat([stored, valid[row]])
                received = torch.zeros(self.group, key.shape[0], dtype=torch.float64)
                for member in range(self.group):
                    query = states[0][row, head * self.group + member].double()
                    expected, received[member] = dense(query, key, value, present, valid[row], self.dim**-0.5)
                    got = output[row, head * self.group + member].double()
                    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
                sums = torch.cat([past_score, torch.zeros(tokens, dtype=torch.float64)]) + received.amax(0)
                kept = after.mask[row, head]
                torch.testing.assert_close(after.score[row, head][kept].double(), sums[kept], rtol=1e-4, atol=1e-5)

    def pages(self, layers: slice = slice(None)) -> int:
        """Number of pages that the stored tokens fill, including partly filled ones."""
        held = payload(self.store)
        parts = ((held.high, self.store.layout.high), (held.low, self.store.layout.low))
        return sum(int((-(-count[layers] // layout.capacity)).sum()) for count, layout in parts)


def dense(query: Tensor, key: Tensor, value: Tensor, present: Tensor, real: Tensor, scaling: float):
    """Causal attention of one head, aligned at the last key: output, and what every key receives from later queries."""
    tokens, past = query.shape[0], key.shape[0] - query.shape[0]
    output, received = torch.zeros(tokens, value.shape[1], dtype=torch.float64), torch.zeros(key.shape[0]).double()
    column = torch.arange(key.shape[0])
    for start in range(0, tokens, 1000):
        rows = torch.arange(start, min(start + 1000, tokens))
        own = rows[:, None] + past
        logits = (query[rows] @ key.T * scaling).masked_fill((column > own) | ~present, -torch.inf)
        probabilities = logits.softmax(-1).nan_to_num() * real[rows, None]
        output[rows] = probabilities @ value
        received += probabilities.masked_fill(column == own, 0.0).sum(0)
    return output, received


@pytest.mark.parametrize("tokens", [65, 100, 512, 1111, 4000])
def test_fault_1_prompt_scores_stay_with_their_tokens(tokens: int) -> None:
    """Sums, keys and values of every stored token are its own, whichever level it was sorted into."""
    run = Run(alpha_high=1.0, alpha_low=0.4, heads=2, group=1, dim=16, window=16)
    (_, key, value), *_ = run.forward(tokens)
    held = read_tokens(run.store, 0)
    for level, steps in ((2, (255, 15)), (1, (15, 3))):
        place = held.levels == level
        assert place.any()
        for read, exact, count in zip((held.keys, held.values), (key, value), steps):
            exact = exact[place]
            step = (exact.amax(-1) - exact.amin(-1)) / count
            assert ((read[place] - exact).abs().amax(-1) <= 0.51 * step + 0.01).all()


@pytest.mark.parametrize("padding_side", ["left", "right"])
def test_fault_2_ragged_batches_with_lengths_that_are_multiples_of_64(padding_side: str) -> None:
    valid = left_padding((64, 128, 192, 100, 1, 63, 65, 256))
    run = Run(batch=8, alpha_high=1.0, alpha_low=0.5)
    run.forward(256, valid if padding_side == "left" else valid.flip(-1))
    run.steps(3)
    check_integrity(run.store)


@pytest.mark.slow
def test_fault_3_more_than_5760_tokens_in_a_head() -> None:
    run = Run(heads=1, dim=8, alpha_high=1.0, alpha_low=0.0)
    run.forward(6200)
    run.steps(5)
    run.forward(3)
    assert int((run.store.high_count + run.store.low_count).min()) > 5760


def test_fault_4_a_full_free_list_and_an_empty_one() -> None:
    """A prompt takes the last page, and dropping rows returns all others; the count and the pages agree both times."""
    run = Run(batch=3, alpha_high=1.0, alpha_low=0.0, window=4, page_bytes=512)
    run.forward(200)
    store = run.store
    pages = store.pool.capacity - 1
    assert store.pool.free_list.free == 0
    assert store.pool.free_list.ids().numel() == 0
    check_integrity(store)
    run.forward(1)
    check_integrity(store)

    pool = PagePool(512, CPU)
    pool.ensure_free(pages)
    _, taken = pool.free_list.take(torch.tensor([pages]))
    assert pool.free_list.free == 0
    pool.free_list.give(taken)
    assert pool.free_list.free == pages
    pool.ensure_free(pages)
    assert pool.capacity == pages + 1
    with pytest.raises(MemoryError):
        pool.free_list.take(torch.tensor([pages + 1]))


@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
def test_fault_5_prompts_shorter_than_alpha_high_tokens(tokens: int) -> None:
    """There, alpha_high / N is above 1: no mean reaches it, and nothing else goes wrong."""
    run = Run(batch=2, alpha_high=5.0, alpha_low=0.0, window=1)
    run.forward(tokens)
    assert payload(run.store).high.sum() == 0
    assert (payload(run.store).low == tokens - 1).all()
    run.steps(6)
    check_integrity(run.store)


def test_fault_6_no_low_page_where_no_low_tier_is_in_use() -> None:
    run = Run(batch=2, layers=2, heads=3, alpha_high=0.8, alpha_low=0.8, window=4, page_bytes=640)
    run.forward(150, check=False)
    rows = run.store.high_count.numel()
    assert run.store.pool.capacity == 1 + run.pages()
    for _ in range(60):
        run.forward(1, check=False)
        assert not run.store.low_count.any()
        # what the next steps may need: at most one more high page per row
        assert run.store.pool.capacity <= 1 + run.pages() + rows
    assert int((run.store.table.table != 0).sum()) == run.pages()
    check_integrity(run.store)


@pytest.mark.parametrize("alpha_high, alpha_low", [(1.0, 0.5), (1e9, 0.0), (2.0, 2.0)])
def test_fault_7_a_prompt_reserves_pages_layer_by_layer_and_as_needed(alpha_high: float, alpha_low: float) -> None:
    run = Run(batch=2, layers=4, alpha_high=alpha_high, alpha_low=alpha_low, window=8, page_bytes=512)
    store = run.store
    valid = left_padding((300, 120))
    begin(store, 300, valid)
    for layer in range(4):
        run.attend(layer, run.draw(300), valid)
        assert store.pool.capacity == 1 + run.pages(slice(layer + 1))
    if_all_were_high = 4 * run.heads * sum(-(-(n - 8) // store.layout.high.capacity) for n in (300, 120))
    assert store.pool.capacity < 0.9 * if_all_were_high


def test_fault_8_pages_are_given_back_during_generation() -> None:
    """A turn whose first token draws all attention frees the past; a dropped row frees all its pages."""
    run = Run(batch=3, alpha_high=1.0, alpha_low=0.6, window=4, page_bytes=512)
    store = run.store
    run.forward(200)
    run.steps(20)
    free, held = store.pool.free_list.free, run.pages()
    query, key, value = run.draw(400)
    query[:], key[:], key[:, :, 0] = 4.0, -1.0, 1.0
    begin(store, 400)
    run.attend(0, (query, key, value))
    assert run.pages() < 0.8 * held
    assert store.pool.free_list.free == free + held - run.pages()
    check_integrity(store)

    capacity, held = store.pool.capacity, run.pages()
    select_rows(store, torch.tensor([1]))
    assert run.pages() < held
    assert store.pool.free_list.free == capacity - 1 - run.pages()
    run.steps(100, check=False)
    assert store.pool.capacity == capacity
    check_integrity(store)


@pytest.mark.parametrize("batch, padding", [(1, False), (3, True)])
def test_fault_9_no_host_reads_between_two_refreshes(
    monkeypatch: pytest.MonkeyPatch, batch: int, padding: bool
) -> None:
    """Reads the device once per `refresh_steps` generated tokens, regardless of the number of layers."""
    monkeypatch.setattr(cache_layer, "reads_are_free", lambda device: False)
    model = tiny_model("llama", "diffkv", num_hidden_layers=3)
    cache = DiffKVCache(model.config, alpha_high=1.0, alpha_low=0.5, window=4)
    mask = torch.ones(batch, 40, dtype=torch.long)
    if padding:
        mask[-1, :15] = 0
    reads = HostReads(monkeypatch)
    with torch.no_grad():
        with reads:
            model(torch.randint(50, (batch, 40)), attention_mask=mask, **passing(cache))
        assert reads.found, "the counter sees nothing, not even the prompt's reads"
        per_step = []
        for _ in range(3 * Store.refresh_steps):
            mask = torch.cat([mask, torch.ones(batch, 1, dtype=torch.long)], dim=1)
            reads.found.clear()
            with reads:
                model(torch.randint(50, (batch, 1)), attention_mask=mask, **passing(cache))
            per_step.append(list(reads.found))
    for step, found in enumerate(per_step):
        if step % Store.refresh_steps:
            assert found == [], f"step {step}"
    refreshes = [len(found) for found in per_step[:: Store.refresh_steps]]
    assert all(2 <= count <= 4 for count in refreshes), per_step[:: Store.refresh_steps]
    cache.check_integrity()


@pytest.mark.parametrize("dim", [8, 64, 80, 96, 128, 256])
def test_fault_10_head_dims(dim: int) -> None:
    run = Run(batch=2, dim=dim, alpha_high=1.0, alpha_low=0.5, window=4)
    run.forward(60, left_padding((60, 31)))
    run.steps(5)
    assert all((read_tokens(run.store, 0).levels == level).any() for level in (0, 1, 2, 3))


@pytest.mark.parametrize("group", [1, 3, 5, 6, 7, 9, 12, 16])
def test_fault_10_group_sizes(group: int) -> None:
    run = Run(batch=2, group=group, alpha_high=1.0, alpha_low=0.5, window=4)
    run.forward(60, left_padding((60, 31)))
    run.steps(5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fault_10_a_tier_of_16_bits(dtype: torch.dtype) -> None:
    """Checks that a 16-bit tier stores tokens exactly."""
    run = Run(high=FULL, low=Precision(16, 16, 2, 2), alpha_high=1.0, alpha_low=0.0, window=4, dtype=dtype)
    fed = run.forward(60)
    for _ in range(10):
        fed += run.forward(1)
    held = read_tokens(run.store, 0)
    assert all((held.levels == level).any() for level in (1, 2))
    for read, part in ((held.keys, 1), (held.values, 2)):
        assert torch.equal(read.to(dtype), torch.cat([states[part] for states in fed], dim=2))


def test_fault_10_chunks_of_a_prompt_and_repeated_rows() -> None:
    """Chunked prompts, several sequences from one prompt, beams: rows are copied and then diverge."""
    run = Run(batch=2, alpha_high=1.0, alpha_low=0.5, window=4)
    for tokens in (30, 30, 7):
        run.forward(tokens)
    select_rows(run.store, torch.tensor([0, 0, 0, 1]))
    for index in ([0, 1, 1, 3], [3, 2, 0, 0]):
        run.steps(4)
        select_rows(run.store, torch.tensor(index))
        check_integrity(run.store)
