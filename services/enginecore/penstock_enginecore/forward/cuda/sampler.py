"""Sampling on the device: greedy sampling, and random sampling with or without filters, from logits to which rules are
applied on the device.
"""

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from penstock_enginecore.forward.base import ForwardBatch
from penstock_enginecore.forward.cuda.buffers import (
    DRAW_DTYPES,
    MAX_CAPTURED_TOKENS,
    StepInputs,
    StepShape,
    draw_values,
    to_device,
)
from penstock_enginecore.forward.cuda.kernel_api import MAX_SCORED, Draws
from penstock_enginecore.sample.base import DrawSettings, LaunchedTokens, PlainDraws, Sampler, SamplingInputs, uniforms
from penstock_enginecore.sample.rules import (
    NEVER,
    Entries,
    GrammarRows,
    LogitRules,
    PenaltyEntries,
    apply_rules,
    mask_grammar,
)
from penstock_enginecore.sample.sampler import PackLogprobs, pack_logprobs

if TYPE_CHECKING:  # Triton is imported only if there is a device for its kernels
    from penstock_enginecore.forward.cuda.kernels.sample import TokenSampler

MaskRows = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Function that applies grammar masks to rows of logits, such as ``kernels.mask.mask``."""

logger = logging.getLogger(__name__)

_MAX_SCORE_ERROR = 1e-4
MakeSampling = Callable[[int, int, torch.device], "TokenSampler"]
"""Function that creates sampling kernels. The arguments of the function are the maximum number of rows, the vocabulary
size and the device.
"""


class DeviceLauncher:
    """``TokenLauncher`` for a device.

    ``launch`` returns new tensors. The memory of the kernels that ``launch`` uses grows with the number of rows.
    ``for_steps`` has the kernels for captured steps, whose memory never moves.
    """

    def __init__(
        self,
        vocab: int,
        device: torch.device,
        make: MakeSampling,
        score: PackLogprobs = pack_logprobs,
        mask: MaskRows | None = None,
    ) -> None:
        """Args:
        vocab: Number of logits of a row.
        device: The device.
        make: Creates sampling kernels.
        score: Computes log-probabilities with up to ``MAX_SCORED`` likeliest tokens.
        mask: Applies grammar masks, or None for torch's operations.
        """
        self._score = score
        self._mask = mask
        self._vocab = vocab
        self._device = device
        self._make = make
        self._max_rows = MAX_CAPTURED_TOKENS
        self._kernels = self.for_steps = make(self._max_rows, vocab, device)

    def launch(self, logits: torch.Tensor, draws: PlainDraws, rules: LogitRules | None = None) -> LaunchedTokens:
        """Launch the sampling kernels and return the sampled tokens. Random sampling needs one copy to the device, and
        greedy sampling needs none. Rules need two more copies, and change a float32 copy of ``logits``.
        """
        rows = len(logits)
        if rules:
            logits = logits.to(torch.float32, copy=True)
            apply_rules(logits, rules, None if self._mask is None else self._mask_grammar, self._upload)
        if rows > self._max_rows:
            self._max_rows = 1 << (rows - 1).bit_length()
            self._kernels = self._make(self._max_rows, self._vocab, self._device)
        width = aligned_rows(rows)
        results = torch.zeros(2, width, dtype=torch.int32, device=self._device)
        peaks = torch.empty(rows, dtype=torch.float32, device=self._device)
        on_device = None
        if draws.any_drawn:
            on_device = Draws(*to_device(list(zip(draw_values(draws), DRAW_DTYPES, strict=True)), self._device))
        self._kernels.sample(
            logits.contiguous(), on_device, results[0, :rows], peaks, results[1, :rows], filtered=draws.any_filtered
        )
        if rules:
            self._discount(results[1, :rows], logits, results[0, :rows], rules)
        return LaunchedTokens(results, rows)

    def score(self, logits: torch.Tensor, token_ids: torch.Tensor, count: int) -> torch.Tensor:
        """Launch the kernels of log-probabilities, and return the packed log-probabilities of ``token_ids``. Torch
        computes more than ``MAX_SCORED`` likeliest tokens.
        """
        return (self._score if count <= MAX_SCORED else pack_logprobs)(logits.contiguous(), token_ids, count)

    def _discount(
        self, num_nans: torch.Tensor, logits: torch.Tensor, token_ids: torch.Tensor, rules: LogitRules
    ) -> None:
        """Subtract from ``num_nans`` int32 ``[rows]`` the logits that do not count because of the rules, as in
        ``SampledTokens``.
        """
        has_rule = np.zeros(len(logits), dtype=np.bool_)
        has_rule[rules.rows] = True
        penalties = rules.penalties
        counted = () if penalties is None else (penalties.rows, penalties.token_ids)
        ruled, *index = self._upload([has_rule, *counted])
        # Only a row without any token that can be chosen has a token with a logit of minus infinity.
        chosen = logits.gather(1, token_ids.long()[:, None]).squeeze(1)
        num_nans.sub_((ruled & (chosen == NEVER)).int())
        if index:
            values = logits[tuple(index)]
            num_nans.index_add_(0, index[0], (values.isnan() | (values == torch.inf)).int(), alpha=-1)

    def _mask_grammar(self, logits: torch.Tensor, grammar: GrammarRows) -> None:
        rows, words = self._upload([grammar.rows, grammar.bitmask.reshape(-1)])
        if self._mask is not None:
            self._mask(logits, rows, words.view(len(rows), -1))

    def _upload(self, vectors: Sequence[npt.NDArray[Any]]) -> list[torch.Tensor]:
        return to_device([(vector, torch.from_numpy(vector[:0]).dtype) for vector in vectors], self._device)


def aligned_rows(rows: int) -> int:
    """Return the number of rows after padding, so that results begin at multiples of 16 bytes. The kernels are compiled
    for this alignment.
    """
    return -(-rows // 4) * 4


def difference(launcher: DeviceLauncher, sampler: Sampler, logits: torch.Tensor) -> str:
    """Return text about the number of tokens that ``launcher`` and ``sampler`` sample differently, or an empty text if
    all tokens are equal.

    ``launcher`` and ``sampler`` sample from ``logits`` ``[at least 9 rows, vocab]`` with all kinds of sampling
    parameters, first without rules and then with rules.
    """
    rows = len(logits)
    number = np.arange(rows)
    settings = DrawSettings.off(rows)._replace(
        temperature=np.where(number % 4 == 0, 0.0, 0.5 + number % 3),
        top_k=np.where(number % 5 == 1, 2, 0),
        top_p=np.where(number % 3 == 1, 0.8, 1.0),
        min_p=np.where(number % 7 == 2, 0.05, 0.0),
    )
    seeds = number.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for rules in (LogitRules(), _all_kinds(logits.shape[1])):
        inputs = SamplingInputs(settings, uniforms(seeds, number), rules)
        expected = sampler.sample(logits.clone(), inputs).token_ids
        found = launcher.launch(logits, PlainDraws.of(settings, seeds, number), rules).token_ids.cpu().numpy()
        if wrong := int((found != expected).sum()):
            return f"{wrong} of {rows} tokens differ{' with rules' if rules else ''}"
    return ""


def proved_mask(mask: MaskRows, vocab: int, device: torch.device) -> MaskRows | None:
    """Return ``mask`` if its results match those of torch. Otherwise log a warning and return None."""
    random = np.random.default_rng(0)
    grammar = GrammarRows(np.array([2, 0]), random.integers(-(2**31), 2**31, (2, -(-vocab // 32)), dtype=np.int32))
    expected, found = torch.zeros(2, 3, vocab, device=device)
    try:
        mask_grammar(expected, grammar)
        mask(found, *(torch.from_numpy(array).to(device) for array in (grammar.rows, grammar.bitmask)))
        reason = "" if torch.equal(found, expected) else "masked logits differ"
    except Exception as e:  # for example an error of a compiler or driver
        reason = f"{type(e).__name__}: {e}"
    if not reason:
        return mask
    logger.warning(
        "applying grammar masks with PyTorch instead of the kernel (slower), because the kernel failed its check reason=%s",
        reason,
    )
    return None


def proved_score(score: PackLogprobs, logits: torch.Tensor) -> PackLogprobs:
    """Return ``score`` if its log-probabilities match those of torch. Otherwise log a warning and return the function
    of torch.
    """
    try:
        reason = score_difference(score, logits)
    except Exception as e:  # for example an error of a compiler or driver
        reason = f"{type(e).__name__}: {e}"
    if not reason:
        return score
    logger.warning(
        "computing log-probabilities with PyTorch instead of the kernels (slower), because the kernels failed their check "
        "reason=%s",
        reason,
    )
    return pack_logprobs


def score_difference(score: PackLogprobs, logits: torch.Tensor) -> str:
    """Return text about the log-probabilities of ``score`` that differ from those of torch, or an empty text.

    The order of tokens with equal logits may differ.
    """
    chosen = torch.arange(len(logits), device=logits.device) % logits.shape[1]
    for count in (0, min(MAX_SCORED, logits.shape[1])):
        found, expected = (each(logits, chosen, count) for each in (score, pack_logprobs))
        if bool((found[2] != expected[2]).any()):
            return "ranks differ"
        if bool((logits.gather(1, found[0].long()) != logits.gather(1, expected[0].long())).any()):
            return "the likeliest tokens differ"
        largest = (found[1].view(torch.float32) - expected[1].view(torch.float32)).abs().max().item()
        if not largest < _MAX_SCORE_ERROR:
            return f"log-probabilities differ by up to {largest:.2g}"
    return ""


def _all_kinds(vocab: int) -> LogitRules:
    """Return rules of all kinds, for the first nine rows of logits."""
    random = np.random.default_rng(0)

    def some(*rows: int) -> Entries:
        return Entries.join([(row, random.permutation(vocab)[: max(1, vocab // 2)]) for row in rows])

    biased, counted = some(2, 5), some(3, 6)
    sizes = len(biased.rows), len(counted.rows)
    masks = random.integers(-(2**31), 2**31, (4, -(-vocab // 32)), dtype=np.int32)
    return LogitRules(
        GrammarRows(np.array([0, 4, 5, 6]), masks),
        some(1, 4),
        (biased, random.normal(size=sizes[0]).astype(np.float32)),
        PenaltyEntries(
            *(counted.rows, counted.token_ids),
            random.uniform(0.5, 2.0, sizes[1]).astype(np.float32),
            random.uniform(-2.0, 2.0, sizes[1]).astype(np.float32),
        ),
        some(6, 7, 8),
    )


# Tokens that stay on the device: the tokens that an earlier step sampled and this step gets as input, and the tokens
# that this step samples.


class TokenFeedback:
    """Reads and writes sampled tokens that stay on the device, in every step of a padded shape. The reads and writes
    are captured as a part of the step.

    The host reads nothing. All rows are sampled, including padding rows, and unused tokens are ignored. ``kernels``
    sample the tokens. The argument is None if the caller samples.
    """

    def __init__(self, device: torch.device, kernels: "TokenSampler | None" = None) -> None:
        self._kernels = kernels
        self._newest = torch.zeros(1, dtype=torch.int32, device=device)
        rows = MAX_CAPTURED_TOKENS if kernels is not None else 0
        self._results = torch.zeros(2 * rows, dtype=torch.int32, device=device)
        self._peaks = torch.zeros(rows, dtype=torch.float32, device=device)

    @property
    def nobody(self) -> int:
        """Index of the row of ``newest`` that receives tokens of padding rows. This row belongs to no request."""
        return len(self._newest) - 1

    def moves(self, batch: ForwardBatch) -> bool:
        """Use the tensor ``newest`` of ``batch`` from now on.

        Returns whether this is another tensor than before. If so, captured graphs are invalid.
        """
        newest = (
            batch.choice.newest if batch.choice is not None else batch.fed.newest if batch.fed is not None else None
        )
        if newest is None or newest is self._newest:
            return False
        self._newest = newest
        return True

    def feed(self, inputs: StepInputs) -> None:
        """Write the tokens that only the device has into the step's input token ids."""
        fed = inputs.fed
        torch.index_select(self._newest, 0, fed.rows, out=fed.ids)
        torch.where(fed.known, fed.ids, inputs.token_ids, out=inputs.token_ids)

    def choose(self, logits: torch.Tensor, inputs: StepInputs, shape: StepShape) -> None:
        """Sample a token from each row of ``logits`` ``[requests, vocab]`` of a step of padded ``shape``, and store the
        tokens.
        """
        if self._kernels is None or shape.is_large:
            return
        token_ids, num_nans = (row[: shape.requests] for row in self._results_of(shape))
        peaks = self._peaks[: shape.requests]
        self._kernels.sample(logits, inputs.draws, token_ids, peaks, num_nans, filtered=True)
        self._newest.index_copy_(0, inputs.kept_rows, token_ids)

    def launched(self, batch: ForwardBatch, shape: StepShape) -> LaunchedTokens | None:
        """Return the tokens sampled for ``batch``, or None if none were requested. The next step overwrites these
        tokens.
        """
        if batch.choice is None or self._kernels is None or shape.is_large:
            return None
        return LaunchedTokens(self._results_of(shape), len(batch.choice.kept_rows))

    def _results_of(self, shape: StepShape) -> torch.Tensor:
        width = aligned_rows(shape.requests)
        return self._results[: 2 * width].view(2, width)
