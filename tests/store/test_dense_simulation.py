"""The dense simulation against hand-computed results and PyTorch's own attention."""

import math

import pytest
import torch
from dense_simulation import HIGH, LOW, PADDING, PRUNED, WINDOW, LayerSimulation, algorithm_one
from simulated_storage import SimPrecision, decode, quantise, round_trip
from torch.nn.functional import scaled_dot_product_attention

EXACT = SimPrecision(16, 16)
K8V4, K4V2 = SimPrecision(8, 4), SimPrecision(4, 2)


def simulation(
    *,
    alpha_high=0.0,
    alpha_low=0.0,
    batch=1,
    heads=1,
    dim=4,
    high=EXACT,
    low=EXACT,
    dtype=torch.float64,
    **options,
) -> LayerSimulation:
    return LayerSimulation(
        batch, heads, dim, high=high, low=low, alpha_high=alpha_high, alpha_low=alpha_low, dtype=dtype, **options
    )


def feed(sim: LayerSimulation, columns: int, valid=None, batch=1, heads=1, dim=4, dtype=torch.float64) -> None:
    """Forwards zero queries, which attend uniformly, with random keys and values."""
    key, value = torch.randn(2, batch, heads, columns, dim, dtype=dtype)
    sim.forward(torch.zeros_like(key), key, value, None if valid is None else torch.tensor(valid))


def set_state(sim: LayerSimulation, levels: list[int], sums: list[float]) -> None:
    """Overwrites the levels and sums of a simulation with one row and one head."""
    sim._levels[0, 0] = torch.tensor(levels, dtype=torch.int8)
    sim._keys[sim._levels == PRUNED] = 0
    sim._values[sim._levels == PRUNED] = 0
    sim._sums[0, 0] = torch.tensor(sums)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


class TestQuantise:
    @pytest.mark.parametrize(
        ("bits", "x", "codes", "decoded"),
        [
            # Scale 8; 2 lies halfway and goes to the even code 0.
            (1, [-2, 6, 2, 1.9, 2.1], [0, 1, 0, 0, 1], [-2, 6, -2, -2, 6]),
            # Scale 3; 1.5 lies halfway between codes 1 and 2, -1.5 between 0 and 1.
            (2, [-3, 0, 1.5, -1.5, 6], [0, 1, 2, 0, 3], [-3, 0, 3, -3, 6]),
            # Scale 2; 5 lies halfway between codes 2 and 3, 7 between 3 and 4.
            (3, [0, 5, 7, 7.1, 14], [0, 2, 4, 4, 7], [0, 4, 8, 8, 14]),
            # Scale 1; 2.5 and 3.5 go to the even neighbour.
            (4, [0, 2.5, 3.5, 7.4, 15], [0, 2, 4, 7, 15], [0, 2, 4, 7, 15]),
            # Scale 1, zero -2.
            (5, [-2, 0.5, 19.6, 29], [0, 2, 22, 31], [-2, 0, 20, 29]),
            # Scale 1/2.
            (6, [0, 0.25, 0.75, 20.3, 31.5], [0, 0, 2, 41, 63], [0, 0, 1, 20.5, 31.5]),
            # Scale 1, zero -1.
            (8, [-1, 0.5, 1.5, 126.5, 254], [0, 2, 2, 128, 255], [-1, 1, 1, 127, 254]),
            # fp16 has steps of 2 here: the minimum 2049 is stored as 2048, so the maximum would need code 16.
            (4, [2049, 2064, 2051], [1, 15, 3], [2049, 2063, 2051]),
            # The minimum 2051 is stored as 2052 and would need code -1.
            (4, [2051, 2066, 2053], [0, 14, 1], [2052, 2066, 2053]),
            # Scale 1/3 is stored as 0.333251953125.
            (2, [0, 1], [0, 3], [0, 0.999755859375]),
            # Equal values, stored as the nearest fp16.
            (8, [0.1, 0.1], [0, 0], [0.0999755859375, 0.0999755859375]),
            # A scale too small for fp16 decodes to the zero.
            (8, [1, 1.000001], [0, 0], [1, 1]),
        ],
    )
    def test_by_hand(self, bits: int, x: list, codes: list, decoded: list) -> None:
        stored = quantise(torch.tensor(x, dtype=torch.float64), bits)
        assert stored[0].flatten().tolist() == codes
        assert decode(*stored).tolist() == decoded

    def test_each_group_has_its_own_scale(self) -> None:
        codes, scale, zero = quantise(torch.tensor([0.0, 3.0, 10.0, 40.0]), 2, groups=2)
        assert codes.tolist() == [[0, 3], [0, 3]]
        assert scale.flatten().tolist() == [1, 10] and zero.flatten().tolist() == [0, 10]
        assert decode(codes, scale, zero).tolist() == [0, 3, 10, 40]

    def test_sixteen_bits_are_the_model_dtype(self) -> None:
        x = torch.tensor([1 + 2**-9, 1e5])
        assert torch.equal(round_trip(x, 16, 1, torch.float32), x)
        assert round_trip(x, 16, 1, torch.bfloat16).tolist() == [1, 99840]

    def test_values_beyond_fp16_are_refused(self) -> None:
        with pytest.raises(ValueError, match="fp16"):
            quantise(torch.tensor([0.0, 1e5]), 1)


class TestAlgorithmOne:
    """Thresholds are 0.1 and 0.5; token 3 is the candidate, token 4 is the window."""

    @pytest.mark.parametrize(
        ("levels", "mean", "changes"),
        [
            # High candidate, no token has fallen: no victim.
            ([HIGH, LOW, HIGH], [0.6, 0.0, 0.7, 0.9], [(3, HIGH)]),
            # High candidate, the least high token earns low. The low tier is not examined.
            ([HIGH, LOW, HIGH], [0.4, 0.0, 0.7, 0.9], [(3, HIGH), (0, LOW)]),
            # Only the least significant token falls, even if two have.
            ([HIGH, LOW, HIGH], [0.4, 0.0, 0.3, 0.9], [(3, HIGH), (2, LOW)]),
            # High candidate, the least high token is pruned.
            ([HIGH, LOW, HIGH], [0.4, 0.0, 0.05, 0.9], [(3, HIGH), (2, PRUNED)]),
            # Ties go to the oldest.
            ([PRUNED, HIGH, HIGH], [0.0, 0.3, 0.3, 0.9], [(3, HIGH), (1, LOW)]),
            # The newcomer is alone in its tier, or the least significant in it.
            ([PRUNED, LOW, PRUNED], [0.0, 0.0, 0.0, 0.5], [(3, HIGH)]),
            ([HIGH, LOW, PRUNED], [0.6, 0.0, 0.0, 0.5], [(3, HIGH)]),
            # Low candidate, no token has fallen; the high tier is not examined.
            ([HIGH, LOW, HIGH], [0.0, 0.2, 0.0, 0.3], [(3, LOW)]),
            # Low candidate, the least low token is pruned, and among equals the oldest.
            ([LOW, LOW, HIGH], [0.09, 0.05, 0.0, 0.3], [(3, LOW), (1, PRUNED)]),
            ([LOW, LOW, HIGH], [0.05, 0.05, 0.0, 0.3], [(3, LOW), (0, PRUNED)]),
            # A low token that now earns high stays low.
            ([LOW, PRUNED, PRUNED], [0.9, 0.0, 0.0, 0.3], [(3, LOW)]),
            # A candidate exactly on a threshold belongs above it.
            ([PRUNED, PRUNED, PRUNED], [0.0, 0.0, 0.0, 0.1], [(3, LOW)]),
            # Pruned candidate: no other token is touched.
            ([HIGH, LOW, HIGH], [0.0, 0.0, 0.0, 0.05], [(3, PRUNED)]),
        ],
    )
    def test_branch(self, levels: list, mean: list, changes: list) -> None:
        low, high = torch.tensor(0.1), torch.tensor(0.5)
        levels = torch.tensor([*levels, WINDOW, WINDOW], dtype=torch.int8)
        assert algorithm_one(levels, torch.tensor([*mean, 0.0]), 3, low, high) == changes

    def test_step_from_crafted_sums(self) -> None:
        # Window 1. Tokens 0-3 are seen, then token 4 arrives and token 3 is the candidate, with N = 5. The zero query
        # attends uniformly to the five stored tokens, so each sum grows by 0.2, and later counts are 4, 3, 2, 1.
        # Thresholds are 2 / 5 and 1 / 5: token 0 has mean (1 + 0.2) / 4 = 0.3, low; the others have 0.4 or more.
        sim = simulation(alpha_high=2, alpha_low=1, window=1, high=K8V4, low=K4V2, dtype=torch.float32)
        feed(sim, 4, dtype=torch.float32)
        set_state(sim, [HIGH, LOW, HIGH, WINDOW], [1.0, 0.0, 2.0, 3.0])
        before, values, _ = sim.stored()
        feed(sim, 1, dtype=torch.float32)
        assert sim.levels().tolist() == [[[LOW, LOW, HIGH, HIGH, WINDOW]]]
        torch.testing.assert_close(sim.sums(), torch.tensor([[[1.2, 0.2, 2.2, 3.2, 0.0]]]))
        keys, values_now, mask = sim.stored()
        assert mask.all()
        assert torch.equal(keys[0, 0, 1:3], before[0, 0, 1:3])
        assert torch.equal(keys[0, 0, 3], round_trip(before[0, 0, 3], 8, 1, torch.float32))
        assert torch.equal(values_now[0, 0, 3], round_trip(values[0, 0, 3], 4, 1, torch.float32))
        assert torch.equal(keys[0, 0, 0], round_trip(before[0, 0, 0], 4, 1, torch.float32))
        assert torch.equal(values_now[0, 0, 0], round_trip(values[0, 0, 0], 2, 1, torch.float32))

    def test_pruned_tokens_leave_nothing(self) -> None:
        sim = simulation(alpha_high=2, alpha_low=1, window=1)
        feed(sim, 4)
        set_state(sim, [HIGH, PRUNED, LOW, WINDOW], [0.1, 0.0, 1.0, 3.0])
        sim.forward(*torch.ones(3, 1, 1, 1, 4, dtype=torch.float64))
        assert sim.levels().tolist() == [[[PRUNED, PRUNED, LOW, HIGH, WINDOW]]]
        keys, values, mask = sim.stored()
        assert mask.tolist() == [[[False, False, True, True, True]]]
        assert not keys[~mask].any() and not values[~mask].any() and not sim.sums()[~mask].any()
        # Three tokens are left, and the next one makes four.
        value = torch.full((1, 1, 1, 4), 3.0, dtype=torch.float64)
        output = sim.forward(torch.zeros_like(value), torch.zeros_like(value), value)
        torch.testing.assert_close(output[0, 0, 0], (values[0, 0].sum(0) + 3) / 4)

    def test_requantising_starts_from_the_decoded_value(self) -> None:
        # 7.5 ties to 8 in four bits, and 8 becomes 15 in one bit. Straight from 7.5, one bit would tie to 0.
        high, low = SimPrecision(4, 4), SimPrecision(1, 1)
        sim = simulation(alpha_high=2, alpha_low=0, window=1, high=high, low=low, dim=3, dtype=torch.float32)
        x = torch.tensor([0, 7.5, 15]).expand(1, 1, 3, 3)
        sim.forward(torch.zeros_like(x), x, x)
        set_state(sim, [PRUNED, PRUNED, WINDOW], [0.0, 0.0, 9.0])
        step = torch.zeros(1, 1, 1, 3)
        sim.forward(step, step, step)
        assert sim.levels()[0, 0, 2] == HIGH and sim.stored()[0][0, 0, 2].tolist() == [0, 8, 15]
        sim._sums[0, 0, 2:4] = torch.tensor([0.0, 9.0])
        sim.forward(step, step, step)
        assert sim.levels()[0, 0].tolist() == [PRUNED, PRUNED, LOW, HIGH, WINDOW]
        assert sim.stored()[0][0, 0, 2].tolist() == [0, 15, 15]
        assert round_trip(x[0, 0, 2], 1, 1, torch.float32).tolist() == [0, 0, 15]


class TestPrompt:
    def test_levels_from_uniform_attention(self) -> None:
        # Query j gives 1 / (j + 1) to each of its keys. Means 13/36, 7/24, 1/4; thresholds 0.325 and 0.275.
        sim = simulation(alpha_high=1.3, alpha_low=1.1, window=1)
        feed(sim, 4)
        sums = [1 / 2 + 1 / 3 + 1 / 4, 1 / 3 + 1 / 4, 0, 0]  # the third is pruned
        torch.testing.assert_close(sim.sums(), torch.tensor([[sums]]))
        assert sim.levels().tolist() == [[[HIGH, LOW, PRUNED, WINDOW]]]

    def test_quantises_the_exact_values(self) -> None:
        sim = simulation(alpha_high=1.3, alpha_low=1.1, window=1, high=K8V4, low=K4V2)
        key, value = torch.randn(2, 1, 1, 4, 4, dtype=torch.float64)
        sim.forward(torch.zeros_like(key), key, value)
        keys, values, mask = (x[0, 0] for x in sim.stored())
        key, value = key[0, 0], value[0, 0]
        assert mask.tolist() == [True, True, False, True]
        assert torch.equal(keys[0], round_trip(key[0], 8, 1, torch.float64))
        assert torch.equal(values[0], round_trip(value[0], 4, 1, torch.float64))
        assert torch.equal(keys[1], round_trip(key[1], 4, 1, torch.float64))
        assert torch.equal(values[1], round_trip(value[1], 2, 1, torch.float64))
        assert not keys[2].any() and not values[2].any()
        assert torch.equal(keys[3], key[3]) and torch.equal(values[3], value[3])

    def test_group_maximum_is_over_sums(self) -> None:
        # Query 1 of head 0 and query 2 of head 1 attend to token 0, the other queries to themselves: each head gives
        # token 0 a sum of about 1, whereas the sum of per-query maxima would be 2.
        sim = simulation(dim=3)
        key = torch.eye(3, dtype=torch.float64)[None, None]
        query = 100 * torch.stack([key[0, 0, [0, 0, 2]], key[0, 0, [0, 1, 0]]])[None]
        sim.forward(query, key, key, scaling=1.0)
        torch.testing.assert_close(sim.sums(), torch.tensor([[[1.0, 0.0, 0.0]]]))

    def test_thresholds_per_head(self) -> None:
        sim = simulation(alpha_high=[1.0, 9.0, 9.0], alpha_low=[0.0, 0.0, 9.0], heads=3, window=2)
        feed(sim, 5, heads=3)
        assert sim.levels()[0].tolist() == [
            [HIGH, HIGH, HIGH, WINDOW, WINDOW],
            [LOW, LOW, LOW, WINDOW, WINDOW],
            [PRUNED, PRUNED, PRUNED, WINDOW, WINDOW],
        ]

    def test_thresholds_out_of_order(self) -> None:
        with pytest.raises(ValueError, match="thresholds"):
            simulation(alpha_high=1.0, alpha_low=2.0)

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_non_finite_input_is_refused_before_anything_is_stored(self, bad: float) -> None:
        sim = simulation()
        x = torch.ones(1, 1, 2, 4, dtype=torch.float64)
        with pytest.raises(ValueError, match="finite"):
            sim.forward(x, x, x * bad)
        assert sim.levels().shape == (1, 1, 0)


class TestPast:
    def test_chunk_downgrades_but_never_upgrades(self) -> None:
        # Two zero queries join six tokens: token i gets 1/7 + 1/8 = 0.27 and has 7 - i later queries; N = 8.
        # Thresholds 0.25 and 0.125.
        sim = simulation(alpha_high=2, alpha_low=1, window=2)
        feed(sim, 6)
        means = [0.3, 0.2, 0.1, 0.3, 0.1, 0.2]
        sums = [mean * (7 - i) - 1 / 7 - 1 / 8 for i, mean in enumerate(means)]
        set_state(sim, [LOW, HIGH, HIGH, HIGH, WINDOW, WINDOW], sums)
        feed(sim, 2)
        assert sim.levels()[0, 0].tolist() == [LOW, LOW, PRUNED, HIGH, PRUNED, LOW, WINDOW, WINDOW]

    def test_pruned_tokens_stay_pruned(self) -> None:
        sim = simulation(alpha_high=9, alpha_low=9, window=2)
        feed(sim, 6)
        sim.alpha_high, sim.alpha_low = torch.zeros(2, 1, 1)
        feed(sim, 3)
        assert sim.levels()[0, 0].tolist() == [PRUNED] * 4 + [HIGH] * 3 + [WINDOW] * 2

    def test_first_forward_of_one_token_is_a_prompt(self) -> None:
        sim = simulation(window=1)
        windows = []
        for _ in range(5):
            feed(sim, 1)
            windows.append((sim.levels() == WINDOW).sum().item())
        assert windows == [1, 1, 1, 1, 1]


class TestWindow:
    def test_ragged_rows_keep_their_newest_tokens(self) -> None:
        sim = simulation(batch=3, window=3)
        valid = [[0, 0, 0, 1, 1], [1, 1, 1, 1, 1], [1, 0, 1, 1, 0]]
        feed(sim, 5, [[bool(x) for x in row] for row in valid], batch=3)
        pad, high, win = PADDING, HIGH, WINDOW
        expected = [[pad, pad, pad, win, win], [high, high, win, win, win], [win, pad, win, win, pad]]
        assert sim.levels()[:, 0].tolist() == expected
        feed(sim, 1, [[True], [True], [False]], batch=3)
        expected = [[pad, pad, pad, win, win, win], [high, high, high, win, win, win], [win, pad, win, win, pad, pad]]
        assert sim.levels()[:, 0].tolist() == expected


class TestObservationWindow:
    @pytest.mark.parametrize(
        ("observed", "expected"),
        [
            (1, [3 / 4, 2 / 4, 1 / 4, 0]),
            (2, [7 / 12 * 3 / 2, 7 / 12, 1 / 4, 0]),
            (3, [13 / 12, 7 / 12, 1 / 4, 0]),
        ],
    )
    def test_by_hand(self, observed: int, expected: list) -> None:
        # Padding between and after the real tokens must not count as queries.
        sim = simulation(observation_window=observed)
        feed(sim, 6, [[True, False, True, True, True, False]])
        torch.testing.assert_close(sim.sums()[0, 0, [0, 2, 3, 4]], torch.tensor(expected))

    def test_past_tokens_are_scaled_as_well(self) -> None:
        # In a chunk of three, one query is observed: it attends to five tokens and stands for three queries.
        sim = simulation(observation_window=1)
        feed(sim, 2)
        feed(sim, 3)
        expected = [1 / 2 + 3 / 5, 3 / 5, 2 / 5, 1 / 5, 0]
        torch.testing.assert_close(sim.sums(), torch.tensor([[expected]]))

    def test_wide_window_equals_default(self) -> None:
        sims = [simulation(observation_window=w, window=2, alpha_high=1, heads=2) for w in (None, 7, 100)]
        for columns in (7, 1, 1, 3):
            query = torch.randn(1, 4, columns, 4, dtype=torch.float64)
            key, value = torch.randn(2, 1, 2, columns, 4, dtype=torch.float64)
            outputs = [sim.forward(query, key, value) for sim in sims]
            for sim, output in zip(sims[1:], outputs[1:], strict=True):
                assert torch.equal(output, outputs[0])
                assert torch.equal(sim.sums(), sims[0].sums()) and torch.equal(sim.levels(), sims[0].levels())


class TestAttention:
    @pytest.mark.parametrize("chunks", [[9, *[1] * 8], [5, 4, 1, 1, 3, 1, 2], [1] * 6])
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    def test_lossless_is_plain_attention(self, chunks: list[int], dtype: torch.dtype) -> None:
        batch, heads, group, dim, value_dim, total = 3, 2, 3, 8, 6, sum(chunks)
        options = {"dtype": dtype, "value_dim": value_dim, "window": 4}
        sim = simulation(batch=batch, heads=heads, dim=dim, **options)
        query = torch.randn(batch, heads * group, total, dim, dtype=dtype)
        key = torch.randn(batch, heads, total, dim, dtype=dtype)
        value = torch.randn(batch, heads, total, value_dim, dtype=dtype)
        valid = torch.arange(total) >= torch.tensor([0, 2, chunks[0] - 1])[:, None]
        allowed = torch.ones(total, total, dtype=torch.bool).tril() & valid[:, None, None]
        # Padding queries see themselves, to keep the reference free of NaN, and are not compared.
        mask = allowed | torch.eye(total, dtype=torch.bool)
        expected = scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
        expected = torch.where(valid[:, None, :, None], expected, 0)
        key = torch.where(valid[:, None, :, None], key, math.nan)  # whatever padding holds must not matter
        start = 0
        for columns in chunks:
            part = slice(start, start + columns)
            output = sim.forward(query[:, :, part], key[:, :, part], value[:, :, part], valid[:, part])
            torch.testing.assert_close(output, expected[:, :, part])
            start += columns
        keys, values, stored = sim.stored()
        assert torch.equal(stored, valid[:, None].expand_as(stored))
        assert torch.equal(keys[stored], key[stored]) and torch.equal(values[stored], value[stored])

    def test_softcap_and_sinks_by_the_formula(self) -> None:
        scaling, softcap, sinks = 0.7, 1.5, torch.tensor([0.3, -1.0], dtype=torch.float64)
        sim = simulation(dim=4)
        query = torch.randn(1, 2, 4, 4, dtype=torch.float64)
        key, value = torch.randn(2, 1, 1, 4, 4, dtype=torch.float64)
        expected = torch.zeros_like(query)
        sums = torch.zeros(2, 2, 4)  # per forward and query head: a prompt of three, then one token
        for head in range(2):
            for j in range(4):
                logits = [scaling * float(query[0, head, j] @ key[0, 0, i]) for i in range(j + 1)]
                weights = [math.exp(softcap * math.tanh(logit / softcap)) for logit in logits]
                total = sum(weights) + math.exp(sinks[head])
                for i, weight in enumerate(weights):
                    expected[0, head, j] += weight / total * value[0, 0, i]
                    if j > i:
                        sums[int(j == 3), head, i] += weight / total
        parts = [
            sim.forward(query[:, :, part], key[:, :, part], value[:, :, part], None, scaling, softcap, sinks)
            for part in (slice(0, 3), slice(3, 4))
        ]
        torch.testing.assert_close(torch.cat(parts, dim=2), expected)
        torch.testing.assert_close(sim.sums()[0, 0], sums.amax(1).sum(0))

    def test_output_keeps_the_query_dtype(self) -> None:
        sim = simulation(dtype=torch.bfloat16)
        query, key, value = torch.randn(3, 1, 1, 3, 4).bfloat16()
        output = sim.forward(query, key, value)
        assert output.dtype == torch.bfloat16
        expected = scaled_dot_product_attention(query.float(), key.float(), value.float(), is_causal=True)
        torch.testing.assert_close(output, expected.bfloat16())

    def test_rows_do_not_depend_on_padding_or_on_each_other(self) -> None:
        """Through prompt, steps and a second prompt, a left-padded batch behaves as its rows do alone."""
        lengths, chunks, heads = [5, 12, 9], [12, *[1] * 10, 4, *[1] * 5], 2
        options = {"alpha_high": 1.1, "alpha_low": 0.8, "heads": heads, "window": 3, "high": K8V4, "low": K4V2}
        batched = simulation(batch=3, **options)
        alone = [simulation(**options) for _ in lengths]
        for turn, columns in enumerate(chunks):
            query = 2 * torch.randn(3, 4, columns, 4, dtype=torch.float64)
            key, value = torch.randn(2, 3, heads, columns, 4, dtype=torch.float64)
            skips = [12 - length if turn == 0 else 0 for length in lengths]
            valid = torch.arange(columns) >= torch.tensor(skips)[:, None]
            output = batched.forward(query, key, value, valid)
            for row, (sim, skip) in enumerate(zip(alone, skips, strict=True)):
                own = sim.forward(*(x[row : row + 1, :, skip:] for x in (query, key, value)))
                torch.testing.assert_close(output[row : row + 1, :, skip:], own)
                assert not output[row, :, :skip].any()
        for row, (sim, length) in enumerate(zip(alone, lengths, strict=True)):
            pad = 12 - length
            assert torch.equal(batched.levels()[row, :, pad:], sim.levels()[0])
            assert (batched.levels()[row, :, :pad] == PADDING).all()
            torch.testing.assert_close(batched.sums()[row, :, pad:], sim.sums()[0])
            for mine, own in zip(batched.stored(), sim.stored(), strict=True):
                torch.testing.assert_close(mine[row, :, pad:], own[0])
        present = set(batched.levels().flatten().tolist())
        assert present == {PADDING, PRUNED, LOW, HIGH, WINDOW}
