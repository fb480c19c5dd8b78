"""Tokens chosen on a device: those of the CPU's sampler, whatever rows ask for."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from penstock_enginecore.config import KernelsConfig
from penstock_enginecore.forward.cuda.decoder import device_launcher, proved_launcher
from penstock_enginecore.forward.cuda.sampler import DeviceLauncher, MaskRows
from penstock_enginecore.sample.base import DrawSettings, PlainDraws, SamplingInputs, uniforms
from penstock_enginecore.sample.rules import Entries, GrammarRows, LogitRules, PenaltyEntries, apply_rules, mask_grammar
from penstock_enginecore.sample.sampler import PackLogprobs, TokenLogprobs, TorchSampler, pack_logprobs, token_logprobs
from tests.fakes.models.recorded_launches import RecordedSampling, Recorder
from tests.fakes.models.torch_sampling import TorchSampling

CPU = torch.device("cpu")
NAN, INF = float("nan"), float("inf")


def random_settings(rows: int, seed: int) -> tuple[DrawSettings, np.ndarray, np.ndarray]:
    """Return temperature, top_k, top_p and min_p of all kinds, seeds, and output indices."""
    random = np.random.default_rng(seed)
    return (
        DrawSettings.off(rows)._replace(
            temperature=random.choice([0.0, 0.3, 1.0, 1.7], rows),
            top_k=random.choice([0, 0, 1, 5, 40, 5000], rows),
            top_p=random.choice([1.0, 1.0, 0.5, 0.9, 0.999], rows),
            min_p=random.choice([0.0, 0.0, 0.02, 0.3], rows),
        ),
        random.integers(0, 2**64, rows, dtype=np.uint64),
        random.integers(0, 2**40, rows),
    )


def by_cpu(logits: torch.Tensor, settings: DrawSettings, seeds: np.ndarray, indices: np.ndarray) -> np.ndarray:
    return TorchSampler().sample(logits.clone(), SamplingInputs(settings, uniforms(seeds, indices))).token_ids


def random_logits(rows: int, vocab: int, seed: int) -> torch.Tensor:
    return 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("plain", [True, False], ids=["whole rows", "what filters leave"])
def test_ten_thousand_draws_are_the_cpus(plain: bool) -> None:
    """Six thousand of whole rows and more than four of others, by the kernels' twin in plain torch. Tests of the
    kernels themselves, interpreted, compare some hundreds.
    """
    launcher = DeviceLauncher(500, CPU, TorchSampling)
    count, drawn = 0, set()
    for i in range(12):
        logits = random_logits(500, 500, seed=i)
        settings, seeds, indices = random_settings(500, seed=100 + i)
        if plain:
            settings = DrawSettings.off(500)._replace(temperature=settings.temperature.clip(min=0.3))
        chosen = launcher.launch(logits, PlainDraws.of(settings, seeds, indices)).token_ids.numpy()
        np.testing.assert_array_equal(chosen, by_cpu(logits, settings, seeds, indices))
        count += int((settings[0] > 0).sum())
        drawn |= set(chosen.tolist())
    assert count >= (6000 if plain else 4300)
    assert len(drawn) > 400


def test_a_token_follows_from_its_seed_and_index_alone() -> None:
    launcher = DeviceLauncher(300, CPU, TorchSampling)
    logits = random_logits(9, 300, seed=1)
    settings, seeds, indices = random_settings(9, seed=2)
    together = launcher.launch(logits, PlainDraws.of(settings, seeds, indices)).token_ids.tolist()
    for row in range(9):
        alone = PlainDraws.of(settings.of(np.array([row])), seeds[[row]], indices[[row]])
        assert launcher.launch(logits[[row]], alone).token_ids.tolist() == [together[row]]


def test_what_settings_become_is_what_kernels_read() -> None:
    settings = DrawSettings.off(3)._replace(
        temperature=np.array([0.0, 1e-40, 2.0]),
        top_k=np.array([0, 2**40, 5]),
        top_p=np.array([1.0, 0.5, 1.0]),
        min_p=np.array([0.0, 1.0, 0.5]),
    )
    draws = PlainDraws.of(settings, np.zeros(3, dtype=np.uint64), np.zeros(3, dtype=np.int64))
    np.testing.assert_array_equal(draws.temperature, np.array([0, 1e-30, 2], dtype=np.float32))
    np.testing.assert_array_equal(draws.top_k, [0, 2**31 - 1, 5])
    np.testing.assert_allclose(draws.max_distance, [INF, 0.0, np.log(2)])
    assert (draws.any_drawn, draws.any_filtered) == (True, True)
    greedy = PlainDraws.of(
        DrawSettings.off(1)._replace(top_k=np.full(1, 5), top_p=np.full(1, 0.5), min_p=np.ones(1)),
        np.zeros(1, dtype=np.uint64),
        np.zeros(1, dtype=np.int64),
    )
    assert (greedy.any_drawn, greedy.any_filtered) == (False, False)


def random_rules(rows: int, vocab: int, seed: int) -> LogitRules:
    """Return rules of all kinds. Some rows have several rules, and the last row has none."""
    random = np.random.default_rng(seed)

    def entries(count: int) -> Entries:
        rows_of = sorted(random.choice(rows - 1, 3, replace=False).tolist())
        return Entries.join([(row, random.permutation(vocab)[: random.integers(1, count)]) for row in rows_of])

    masked = np.sort(random.choice(rows - 1, 3, replace=False))
    biased, counted = entries(vocab), entries(vocab)
    return LogitRules(
        GrammarRows(masked, random.integers(-(2**31), 2**31, (3, -(-vocab // 32)), dtype=np.int32)),
        entries(vocab),
        (biased, random.normal(size=len(biased.rows)).astype(np.float32)),
        PenaltyEntries(
            counted.rows,
            counted.token_ids,
            random.uniform(0.3, 3, len(counted.rows)).astype(np.float32),
            random.normal(size=len(counted.rows)).astype(np.float32),
        ),
        entries(vocab),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_with_rules_are_the_cpus(dtype: torch.dtype) -> None:
    rows, vocab = 12, 203
    launcher = DeviceLauncher(vocab, CPU, TorchSampling)
    for seed in range(15):
        logits = random_logits(rows, vocab, seed).to(dtype)
        logits[seed % rows, seed] = (NAN, INF, -INF)[seed % 3]
        before = logits.clone()
        settings, seeds, indices = random_settings(rows, seed)
        rules = random_rules(rows, vocab, seed)
        inputs = SamplingInputs(settings, uniforms(seeds, indices), rules)
        expected = TorchSampler().sample(logits.clone(), inputs)
        found = launcher.launch(logits, PlainDraws.of(settings, seeds, indices), rules)
        waited = found.wait()
        np.testing.assert_array_equal(waited.token_ids, expected.token_ids)
        none = np.zeros(rows, dtype=np.int64)
        np.testing.assert_array_equal(
            none if waited.num_nans is None else waited.num_nans,
            none if expected.num_nans is None else expected.num_nans,
        )
        torch.testing.assert_close(logits, before, rtol=0, atol=0, equal_nan=True)


def test_rules_and_log_probabilities_read_nothing_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorder refuses each operation that would wait for a device."""

    def uploaded(vectors: Any, device: torch.device) -> list[torch.Tensor]:
        return [torch.from_numpy(np.ascontiguousarray(vector)).to(dtype) for vector, dtype in vectors]

    monkeypatch.setattr("penstock_enginecore.forward.cuda.sampler.to_device", uploaded)
    logits = random_logits(6, 203, seed=1)
    settings, seeds, indices = random_settings(6, seed=2)
    draws, rules = PlainDraws.of(settings, seeds, indices), random_rules(6, 203, seed=3)
    launcher = DeviceLauncher(203, CPU, RecordedSampling)
    apply_rules(logits.clone(), rules)  # prepares the table of bytes once per device
    with Recorder(None, may_allocate=True, may_copy=True):
        launched = launcher.launch(logits, draws, rules)
        packed = pack_logprobs(logits, launched.token_ids.long(), 5)
    expected = token_logprobs(logits, launched.token_ids.long(), 5)
    assert torch.equal(TokenLogprobs.unpack(packed.numpy()).logprobs, expected.logprobs)


def test_rows_of_draws_keep_their_settings() -> None:
    settings, seeds, indices = random_settings(40, seed=2)
    draws, rows = PlainDraws.of(settings, seeds, indices), [3, 0, 17, 39]
    chosen, index = draws.rows(rows), np.array(rows)
    expected = PlainDraws.of(settings.of(index), seeds[index], indices[index])
    for field in dataclasses.fields(PlainDraws):
        np.testing.assert_array_equal(getattr(chosen, field.name), getattr(expected, field.name))
    greedy = draws.greedy_in(rows)
    assert not greedy.temperature[index].any()
    np.testing.assert_array_equal(np.delete(greedy.temperature, index), np.delete(draws.temperature, index))
    assert not draws.greedy_in(range(40)).any_drawn


def test_logits_that_are_no_numbers_are_counted() -> None:
    logits = random_logits(3, 20, seed=0)
    logits[1, [4, 7]] = NAN
    settings, seeds, indices = random_settings(3, seed=1)
    launched = DeviceLauncher(20, CPU, TorchSampling).launch(logits, PlainDraws.of(settings, seeds, indices))
    assert launched.results[1, :3].tolist() == [0, 2, 0]
    assert int(launched.token_ids[1]) == 4


def test_no_rows_are_no_tokens() -> None:
    settings, seeds, indices = random_settings(0, seed=1)
    draws = PlainDraws.of(settings, seeds, indices)
    assert DeviceLauncher(20, CPU, TorchSampling).launch(torch.zeros(0, 20), draws).token_ids.tolist() == []


def test_memory_grows_with_the_rows() -> None:
    made: list[int] = []

    def make(max_rows: int, vocab: int, device: torch.device) -> TorchSampling:
        made.append(max_rows)
        return TorchSampling(max_rows, vocab, device)

    launcher = DeviceLauncher(30, CPU, make)
    for rows in (5, 512, 513, 900, 1024):
        settings, seeds, indices = random_settings(rows, seed=rows)
        logits = random_logits(rows, 30, seed=rows)
        chosen = launcher.launch(logits, PlainDraws.of(settings, seeds, indices)).token_ids.numpy()
        np.testing.assert_array_equal(chosen, by_cpu(logits, settings, seeds, indices))
    assert made == [512, 1024]


class OtherSeeds(TorchSampling):
    def sample(self, logits, draws, *args, **options):
        if draws is not None:
            draws = dataclasses.replace(draws, seeds=draws.seeds + 1)
        super().sample(logits, draws, *args, **options)


class OneTooMany(TorchSampling):
    def sample(self, logits, draws, *args, **options):
        if draws is not None:
            draws = dataclasses.replace(draws, top_k=torch.where(draws.top_k > 0, draws.top_k + 1, 0))
        super().sample(logits, draws, *args, **options)


class NoCompiler(TorchSampling):
    def sample(self, *args, **options):
        raise OSError("no C compiler")


@pytest.mark.parametrize(
    ("kernels", "reason"),
    [
        (OtherSeeds, " of 128 tokens differ"),
        (OneTooMany, " of 128 tokens differ"),
        (NoCompiler, "OSError: no C compiler"),
    ],
)
def test_kernels_that_choose_otherwise_are_not_used(
    kernels: type[TorchSampling], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert proved_launcher(CPU, TorchSampler(), 400, torch.float32, kernels) is None
    assert reason in caplog.text


def test_rules_that_are_not_applied_are_noticed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock_enginecore.forward.cuda.sampler.apply_rules", lambda *args, **options: None)
    assert proved_launcher(CPU, TorchSampler(), 400, torch.float32, TorchSampling) is None
    assert " of 128 tokens differ with rules" in caplog.text


def score_wrongly(logits: torch.Tensor, token_ids: torch.Tensor, count: int) -> torch.Tensor:
    packed = pack_logprobs(logits, token_ids, count)
    packed[1].view(torch.float32).sub_(0.01)
    return packed


def rank_wrongly(logits: torch.Tensor, token_ids: torch.Tensor, count: int) -> torch.Tensor:
    packed = pack_logprobs(logits, token_ids, count)
    packed[2] += 1
    return packed


def find_others(logits: torch.Tensor, token_ids: torch.Tensor, count: int) -> torch.Tensor:
    packed = pack_logprobs(logits, token_ids, count)
    packed[0, :, -1] = 0
    return packed


def fail_to_compile(logits: torch.Tensor, token_ids: torch.Tensor, count: int) -> torch.Tensor:
    raise OSError("no C compiler")


@pytest.mark.parametrize(
    ("score", "reason"),
    [
        (score_wrongly, "log-probabilities differ by up to 0.01"),
        (rank_wrongly, "ranks differ"),
        (find_others, "the likeliest tokens differ"),
        (fail_to_compile, "OSError: no C compiler"),
    ],
)
def test_kernels_that_score_otherwise_are_not_used(
    score: PackLogprobs, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    launcher = proved_launcher(CPU, TorchSampler(), 400, torch.float32, TorchSampling, score)
    assert launcher is not None
    assert launcher._score is pack_logprobs
    assert f"reason={reason}" in caplog.text


def test_kernels_score_up_to_twenty_of_the_likeliest_tokens(caplog: pytest.LogCaptureFixture) -> None:
    asked: list[int] = []

    def score(logits: torch.Tensor, token_ids: torch.Tensor, count: int) -> torch.Tensor:
        asked.append(count)
        return pack_logprobs(logits, token_ids, count)

    launcher = proved_launcher(CPU, TorchSampler(), 400, torch.float32, TorchSampling, score)
    assert launcher is not None
    asked.clear()
    logits, chosen = random_logits(2, 400, seed=1), torch.tensor([3, 4])
    for count in (0, 20, 21, 400):
        assert torch.equal(launcher.score(logits, chosen, count), pack_logprobs(logits, chosen, count))
    assert asked == [0, 20]
    assert not caplog.messages


def mask_by_torch(logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> None:
    mask_grammar(logits, GrammarRows(rows.numpy(), words.numpy()))


def mask_the_next_row(logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> None:
    mask_by_torch(logits, (rows + 1) % len(logits), words)


@pytest.mark.parametrize(
    ("mask", "reason"),
    [(mask_the_next_row, "masked logits differ"), (fail_to_compile, "OSError: no C compiler"), (mask_by_torch, "")],
)
def test_a_kernel_of_masks_is_used_if_it_masks_alike(
    mask: MaskRows, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    launcher = proved_launcher(CPU, TorchSampler(), 400, torch.float32, TorchSampling, pack_logprobs, mask)
    assert launcher is not None
    assert launcher._mask is (None if reason else mask)
    assert (f"reason={reason}" in caplog.text) is bool(reason)


def test_kernels_that_choose_alike_are(caplog: pytest.LogCaptureFixture) -> None:
    assert proved_launcher(CPU, TorchSampler(), 400, torch.bfloat16, TorchSampling) is not None
    assert not caplog.messages


def test_a_cpu_chooses_no_tokens_as_a_device() -> None:
    assert device_launcher(CPU, KernelsConfig(), TorchSampler(), 400, torch.float32) is None
    assert device_launcher(torch.device("cuda"), KernelsConfig(sampler=False), TorchSampler(), 9, torch.float32) is None
