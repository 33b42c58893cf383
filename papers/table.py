"""The table of claims: every figure of the five papers, its statements, the paper's numbers and the tolerances.

A figure's first statement is the one that the index shows. Cells of papers are what the papers say: none is computed
from our results. `papers.FIGURES` joins this table with the functions that obtain our results.
"""

from __future__ import annotations

from typing import NamedTuple

from papers.claims import (
    NOTHING,
    Figure,
    Kind,
    Paper,
    Rule,
    Statement,
    above,
    at_least,
    at_most,
    between,
    exact,
    holds,
    near,
)

S = Statement
PAPERS = {paper.name: paper for paper in (
    Paper("BPPSA", "Wang, Bai and Pekhimenko, 2020", "BPPSA: Scaling Back-propagation by Parallel Scan Algorithm",
          "MLSys 2020", "arXiv:1907.10134"),
    Paper("Preprint", "Wang, Bai and Pekhimenko, 2019", "Scaling Back-propagation by Parallel Scan Algorithm",
          "preprint of the MLSys paper, July 2019", "arXiv:1907.10134v1"),
    Paper("OOO", "Oh, Lee, Kim and Seo, 2022",
          "Out-Of-Order BackProp: An Effective Scheduling Technique for Deep Learning", "EuroSys 2022",
          "doi:10.1145/3492321.3519563"),
    Paper("SpecTrain", "Chen, Yang and Cheng, 2018",
          "Efficient and Robust Parallel DNN Training through Model Parallelism on Multi-GPU Platform", "preprint",
          "arXiv:1809.02839"),
    Paper("Fusion", "Jiang, Gu, Liu, Zhu and Pan, 2021",
          "Optimizer Fusion: Efficient Training with Better Locality and Parallelism", "preprint", "arXiv:2104.00237"),
)}  # fmt: skip


def gain(low: float, high: float | None = None) -> Rule:
    """Return the rule of a simulated speed-up: its gain is within 10 % of the paper's, above and below."""
    most = low if high is None else high
    return Rule("gain within 10 %", lambda ours: 0.9 * (low - 1) <= ours - 1 <= 1.1 * (most - 1))


def below(value: float, unit: str = "") -> Rule:
    return Rule(f"below {value:g}{unit}", lambda ours: ours < value)


def points(value: float, by: float = 0.5) -> Rule:
    return Rule(f"within {by:g} points", lambda ours: abs(ours - value) <= by)


THETA = Rule("one constant within a factor of 4", lambda ours: ours <= 4)
"""Of Θ: the largest ratio of ours to the expression over the smallest."""


class Sides(NamedTuple):
    """A row of Tables 4 to 6: seconds of an epoch on a V100. The speed-ups follow from them (Appendix G)."""

    forward: float  # the forward pass only
    baseline: float  # training by PyTorch with cuDNN, and by the paper's scan
    bppsa: float
    prepared: float | None = None  # the forward pass with the preparation of the Jacobians, where the paper has it

    @property
    def overall(self) -> float:
        """Speed-up of the training."""
        return self.baseline / self.bppsa

    @property
    def rest(self) -> float:
        """Seconds of the scan's backward; a preparation that the paper has apart is left out."""
        return self.bppsa - (self.prepared or self.forward)

    @property
    def backward(self) -> float:
        """Speed-up of the backward."""
        return (self.baseline - self.forward) / self.rest

    @property
    def overhead(self) -> float:
        """Share of the baseline's time that the preparation of the Jacobians takes, in percent."""
        return 100 * ((self.prepared or self.forward) - self.forward) / self.baseline


TABLE_4 = {
    10: Sides(1.57, 4.49, 4.24), 30: Sides(2.13, 5.5, 4.91), 100: Sides(3.82, 8.87, 6.64),
    300: Sides(8.79, 18.49, 11.71), 1000: Sides(25.86, 53.33, 29.29), 3000: Sides(75.33, 157.11, 79.48),
    10_000: Sides(250.28, 510.13, 265.02), 30_000: Sides(748.99, 1557.94, 764.31),
}  # fmt: skip
"""RNN, by T; B = 16."""
TABLE_5 = {
    256: Sides(2.13, 4.02, 3.72), 128: Sides(3.87, 7.96, 5.49), 64: Sides(7.51, 14.77, 9.27),
    32: Sides(13.62, 29.51, 15.0), 16: Sides(25.86, 53.33, 29.29), 8: Sides(51.29, 102.77, 56.37),
    4: Sides(100.55, 209.67, 112.23), 2: Sides(200.65, 409.33, 227.13),
}  # fmt: skip
"""RNN, by B; T = 1000."""
TABLE_6 = {
    ("S", 16): Sides(1.66, 3.71, 2.94, 2.1), ("S", 32): Sides(0.91, 1.9, 1.48, 1.09),
    ("S", 64): Sides(0.52, 1.0, 0.82, 0.62), ("M", 16): Sides(3.21, 6.19, 4.2, 3.52),
    ("M", 32): Sides(1.73, 3.3, 2.22, 1.83), ("M", 64): Sides(0.86, 1.82, 1.2, 1.18),
    ("L", 16): Sides(5.78, 11.43, 6.91, 6.06), ("L", 32): Sides(3.04, 6.09, 3.57, 3.23),
    ("L", 64): Sides(1.64, 3.19, 2.33, 2.13),
}  # fmt: skip
"""GRU, by set and B."""
LEAST_REST = 0.05
"""Seconds of a scan's backward, a difference of two rounded times, below which a speed-up says nothing."""


def _times(key: str, named: str, sides: Sides, part: str = "backward") -> list[Statement]:
    """Return the statements of a row of Tables 4 to 6."""
    sure, rest = sides.rest >= LEAST_REST, f" (from {sides.rest:.2f} s)"
    found = [
        S(f"overall {key}", f"{named}: training over BP, the same forward on both sides", f"{sides.overall:.2f}×",
          at_least(round(sides.overall, 2)), _FEW),
        S(f"{part} {key}", f"{named}: backward over BP's", f"{sides.backward:.1f}×{'' if sure else rest}",
          at_least(round(sides.backward, 1)) if sure else NOTHING, _FEW if sure else "Times of 0.01 s do not give it"),
    ]  # fmt: skip
    if sides.prepared:
        found.append(S(f"overhead {key}", f"{named}: preparation of the Jacobians (FO), share of the baseline's step",
                       f"{sides.overhead:.0f} %", at_most(round(sides.overhead), " %"), _FEW))  # fmt: skip
    return found


_FEW = "A scan does about 20 times the work of the recursion, and one core does all of it"
_OWN = "The recursion does a twentieth of the scan's work"
_DIGITS, _NO_GPU = "Digits in place of CIFAR-10", "It needs the paper's GPUs"
_SIMULATED = "Simulated from data sheets; other losses of the paper's baseline are not modelled"
_KERNELS = "Here each kernel uses both cores, and issuing one costs little"
_RINGS = "Here sums are rings that can overtake each other, and most weights are in the last layers"
_DREAM = "Here stashed weights cost nothing"
_SCAN = "Blelloch's scan (BPPSA)"
_SPEC, _DUAL = "DualPipe (2018), weights predicted from the momentum", "DualPipe (2018)"


def _paper(name: str, *figures: tuple[str, str, Kind, str, str, list[Statement]]) -> list[Figure]:
    return [Figure(PAPERS[name], f"{name.lower()}-{figure}", source, kind, states, ran, tuple(statements))
            for figure, source, kind, states, ran, statements in figures]  # fmt: skip


ALL = [*_paper("BPPSA", (
    "fig1", "Fig. 1, 4 and Alg. 1", "exact", "the modified Blelloch scan", _SCAN, [
        S("levels", "levels of the up-sweep and the down-sweep", "⌈log₂(n+1)⌉ − 1 and ⌈log₂(n+1)⌉",
          holds("equal for five n")),
        S("phases", "phases that multiply matrices", "the up-sweep alone", holds()),
        S("outputs", "outputs against Eq. 3 one after the other, n = 1 to 32: largest difference", "the same",
          at_most(1e-12))],
), (
    "fig3", "Fig. 2, 3 and §5.3", "exact", "the scan over VGG-11's 21 convolutional operators", _SCAN, [
        S("whole", "levels of the up-sweep and the down-sweep", "L0–L4 and L5–L10: 4 and 5 between rows", exact((4,
          5))),
        S("up", "balanced scan: rows that products of the up-sweep start from", "L0 to L2: [0, 1]", exact([0, 1])),
        S("down", "balanced scan: rows that products of the down-sweep start from (from L7 on data moves)",
          "L7 to L10: [8, 9]", exact([8, 9])),
        S("last", "the last row", "L10: 10", exact(10))],
), (
    "table1", "Table 1 and §3.3", "exact", "guaranteed zeros of VGG-11's first operators", "patterns in CSR", [
        S("convolution", "sparsity, convolution 3→64, 3×3", "0.99157", exact(0.99157)),
        S("ReLU", "sparsity, ReLU", "0.99998", exact(0.99998)),
        S("max-pool", "sparsity, max-pooling 2×2", "0.99994", exact(0.99994)),
        S("expressions", "the expressions of sparsity", "1 − hf wf / (hi wi), 1 − 1 / chw, 1 − hf wf / (ci hi wi)",
          holds("equal; the first, an approximation, within 0.1 %")),
        S("dense", "that convolution's Jacobian as a full matrix, MiB", "768 MB", exact(768)),
        S("CSR", "its values in CSR, MiB", "6.5 MB", exact(6.5))],
), (
    "table1-time", "Table 1", "measured", "analytic generation over autograd, one column at a time",
    "analytic routines", [
        S("convolution", "convolution", "8.3·10³×", at_least(8.3e3)), S("ReLU", "ReLU", "1.2·10⁶×", at_least(1.2e6)),
        S("max-pool", "max-pooling", "1.5·10⁵×", at_least(1.5e5))],
), (
    "s33", "§3.3 and §4.3", "measured", "products of a known pattern over generic sparse products", "planned products",
        [
        S(key, f"{what}: over the fastest generic library", "significantly better", at_least(1.5))
        for key, what in (("ReLU", "convolution · ReLU"), ("max-pool", "convolution · max-pooling"),
                          ("pruned", "two pruned convolutions"))],
), (
    "fig5", "Fig. 5 and App. D", "executed", "transposed Jacobians of convolution, ReLU and max-pooling", "jacobian_t",
        [
        S("differences", "entries against finite differences, zeros included: largest difference", "the same",
          at_most(1e-6))],
), (
    "fig6", "Fig. 6 and §3.5", "executed", "LeNet-5, batch 256: losses by scan and by BP", f"{_SCAN}, SGD, float32", [
        S("training", "6a, training loss: largest relative difference", "the lines overlap", at_most(1e-4), _DIGITS),
        S("test", "6b, test loss: largest relative difference", "the lines overlap", at_most(1e-4), _DIGITS)],
), (
    "s22", "§2.2", "executed", "agnostic to the first-order optimizer: LeNet-5 with Adam", f"{_SCAN}, Adam", [
        S("float64", "losses by scan and BP, float64: largest relative difference", "no new sources of errors",
          at_most(1e-10)),
        S("float32", "the same in float32", "no new sources of errors", at_most(1e-4),
          "Rounding errors grow over the steps: Adam divides by the gradient's size")],
), (
    "eq6", "Eq. 6, 7 and §3.6", "exact", "complexity of the scan, n = 2 to 10⁶ operators", f"{_SCAN}, counted", [
        S("p > n", "steps with more workers than operators", "Θ(log n)", THETA),
        S("p <= n", "steps with p ≤ n workers, p = 1 to 65 536", "Θ(n/p + log p)", THETA),
        S("work", "products in all", "Θ(n)", THETA),
        S("linear", "steps of the linear scan, for any p", "Θ(n)", THETA)],
), (
    "s51", "§5.1, trends over workers", "exact", "36 and 68 SMs, 16 blocks an SM", f"{_SCAN}, steps counted", [
        S("length", "the speed-up needs longer sequences on 68 SMs than on 36", "its maximum is at a higher T",
          holds("nine tenths of the most at a higher n")),
        S("batch", "the speed-up drops more slowly with the batch on 68 SMs", "at a slower rate", holds()),
        S("grows", "the speed-up grows with T", "it scales as n increases", holds("at every T")),
        S("bounded", "for n much larger than p it is bounded by p", "bounded by p", at_most(1.1, "×"))],
), (
    "space", "§3.6 and App. B", "exact", "memory of a worker, 64 layers", "counted and simulated", [
        S("scan", "BPPSA: transposed Jacobians, p = 1 to 64", "Θ(max(n/p, 1))", THETA),
        S("pipeline", "GPipe: activations, in layers, K = 1 to 64", "Θ(L/K + K)", THETA)],
), (
    "condition", "§3.6", "exact", "a scan of dense Jacobians can outperform BP", f"{_SCAN}, paths counted", [
        S("size", "n / log₂ n from which the scan's path is shorter, over the dimension of x (4, 20, 100)",
          "P_Blelloch / P_Linear < Θ(n / log n)", Rule("within a factor of 2", lambda ours: 0.5 <= ours <= 2))],
), (
    "eq8", "Eq. 8", "executed", "the bitstreams", "BitstreamDataset", [
        S("shares", "share of ones of class c against 0.05 + 0.1 c: largest difference", "Bernoulli(0.05 + 0.1 c)",
          at_most(0.002))],
), (
    "eq9", "Eq. 9", "exact", "a step of the RNN", "RNN", [
        S("states", "hidden states against the equation, float64: largest difference", "the same", at_most(1e-12))],
), (
    "eq11", "Eq. 10 and 11", "exact", "the transposed Jacobian of a GRU's step", "hidden_jacobians", [
        S("Jacobian", "Jacobian against the equations, float64: largest difference", "the same", at_most(1e-14))],
), (
    "table2", "Table 2", "elsewhere", "the platforms", "", [
        S("platforms", "RTX 2070 with 36 SMs, RTX 2080 Ti with 68 SMs", "a list of machines", NOTHING)],
), (
    "table3", "Table 3", "exact", "MFCC features of 3 s of audio", "mfcc", [
        S("shapes", "frames × coefficients of S, M and L", "259×38, 517×24, 1034×12",
          exact([(259, 38), (517, 24), (1034, 12)]))],
), (
    "fig7", "Fig. 7 and §5.1", "measured", "RNN, T = 1000, B = 16, RTX 2070", _SCAN, [
        S("overall", "training over BP, the same forward on both sides", "2.73×", at_least(2.73), _FEW),
        S("backward", "backward over BP's, preparation included", "16×", at_least(16), _FEW),
        S("losses", "80 epochs: the loss curve is the baseline's, scaled in time", "roughly equivalent", holds(),
          "Too short: 1500 of 160 000 steps")],
), (
    "fig8", "Fig. 8, Tables 4 and 5", "measured", "RNN over the sequence length and over the batch",
    f"{_SCAN}, preparation included", [
        S("largest overall", "the largest speed-up of the training", "2.75×", at_least(2.75), _FEW),
        S("largest backward", "the largest speed-up of the backward", "108×", at_least(108), _FEW),
        S("own", "training by the scan over our own BP, the same forward: the best point", "above 1 (Tables 4, 5)",
          above(1, "×"), _OWN),
        S("scales length", "backward speed-up, T = 10 to 3000", "scales as n increases, up to the range of p",
          holds("grows at every T, as Table 4 to 3000"), _FEW),
        S("still", "overly large n: training over BP at T = 30 000", "still better", above(1, "×"), _FEW),
        S("scales batch", "backward speed-up, B = 256 to 32", "scales as B decreases",
          holds("grows at every B, as Table 5 to 32"), _FEW),
        *(s for t, sides in TABLE_4.items() for s in _times(f"T {t}", f"Table 4, T = {t}", sides)),
        *(s for b, sides in TABLE_5.items() if b != 16 for s in _times(f"B {b}", f"Table 5, B = {b}", sides))],
), (
    "fig9", "Fig. 9, Table 6 and §5.2", "measured", "GRU on the sets S, M and L",
    f"{_SCAN}, preparation left out of the backward", [
        S("largest overall", "the largest speed-up of the training", "2.36×", at_least(2.36), _FEW),
        S("largest without", "the largest speed-up of the backward", "13.4×", at_least(13.4), _FEW),
        S("own", "training by the scan over our own BP, the same forward: the best point", "above 1 (Table 6)",
          above(1, "×"), _OWN),
        S("scales", "backward speed-up from S to L, B = 16", "higher as T increases", holds("grows from set to set"),
          _FEW),
        *(s for (name, b), sides in TABLE_6.items() for s in _times(f"{name}, {b}", f"{name}, B = {b}", sides,
            "without"))],
), (
    "fig10", "Fig. 10 and §5.3", "executed", "97 % pruned VGG-11: FLOPs of scan steps and of BP's operators",
    "hybrid scan, up-sweep L0–L2, down-sweep L7–L10", [
        S("largest", "the largest step of the scan over the largest operator of BP", "similar", at_most(2, "×"),
          "Products of the third row fill in")],
), (
    "s43", "§4.3", "executed", "VGG-11 pruned by 97 % and retrained for as many epochs",
        "BP, Adam, class-uniform pruning", [
        S("lost", "accuracy before pruning minus after retraining", "90.1 % and 88.9 %: 1.2 points", at_most(1.2,
          " points"),
          "Too short: 4 of the paper's 100 epochs, digits, half the width")],
), (
    "instruments", "§4.2 and §5.2", "executed", "the GRU tells instruments by their sound", "", [
        S("accuracy", "accuracy", "not stated", NOTHING, "The paper's clips are IRMAS's; these are synthetic")],
), (
    "fig13", "Fig. 13", "executed", "GRU on S, M and L, 400 epochs", _SCAN, [
        S("shape", "loss curves keep the baseline's shape; the times are in Table 6", "a similar shape", holds(),
          "Too short: some of 400 epochs, synthetic clips")],
), (
    "fig11", "Fig. 11 (App. B)", "exact", "GPipe's forward pass", "GPipe's schedule, equal stages", [
        S("inside", "micro-batches inside when the last device begins", "as many as devices", holds("equal"))],
), (
    "fig12", "Fig. 12 (App. C)", "executed", "PipeDream with Adam, 4 stages, three runs each",
    "PipeDream with stashed weights, Adam", [
        S("top-1", "top-1 accuracy lost by PipeDream", "2.6 points", between(1.3, 3.9), "A small VGG-11 on digits"),
        S("top-5", "top-5 accuracy lost by PipeDream", "1.9 points", between(0.95, 2.85), "A small VGG-11 on digits")],
)), *_paper("Preprint", (
    "shared", "Fig. 1–6, Table 1, Alg. 1–10, Eq. 5, 6", "elsewhere", "what came again in 2020", "", [
        S("shared", "the scan, the patterns, the convergence, the complexity", "see BPPSA", NOTHING,
          "Judged there: Fig. 1–6, Table 1, Alg. 1, Eq. 6 and 7")],
), (
    "fig7a", "Fig. 7a and §4.3", "measured", "full VGG-11: latency of every step", "Blelloch's scan, one image", [
        S("many", "products of matrices that meet the linear scan's slowest step", "many", holds("half or more")),
        S("few", "those above it", "a few, significantly", holds("less than half, each above twice")),
        S("weaker", "the linear scan's slowest step over autograd's", "the weaker baseline", above(1, "×"))],
), (
    "fig7b", "Fig. 7b and §4.3", "measured", "full VGG-11: FLOPs projected to seconds", "Blelloch's scan, counted", [
        S("anomalies", "steps above autograd's slowest operator, all products of matrices", "three", exact(3))],
), (
    "fig7c", "Fig. 7c and §4.3", "measured", "97 % pruned VGG-11: FLOPs projected to seconds",
    "Blelloch's scan, counted", [
        S("close", "all steps reach autograd's slowest operator, but one that is close to it", "one anomaly, close",
          holds("at most one, at most twice"), "The product of the third level is full again")],
), (
    "fig8", "Fig. 8", "executed", "full VGG-11: entries of the operands", "Blelloch's scan, counted", [
        S("cause", "the three anomalies come from the loss of sparsity of their operands", "caused by it",
          holds("the same three"))],
), (
    "fig9", "Fig. 9 and §5", "executed", "sparsity along the up-sweep, full and pruned", "Blelloch's scan, counted", [
        S("pooling", "full: sparsity of the convolutions' Jacobians, from the first on", "falls with every pooling",
          holds("falls with each of four, else level")),
        S("pruning", "less limiting for pruned networks", "matrices are sparser", holds("no matrix is denser")),
        S("levels", "pruned: mean sparsity of the products by level", "falls with the levels", holds("never rises"))],
), (
    "s5", "§5", "exact", "the overhead of generating Jacobians", "jacobian_t", [
        S("entries", "entries of the Jacobians of ReLU and max-pooling over the input size", "at most 1", at_most(1)),
        S("amortized", "a convolution's Jacobian is the same for a whole batch", "amortized by the batch",
          holds("equal"))],
), (
    "kinematics", "§4.2", "measured", "inverse kinematics of a long skeleton", "Blelloch's scan, 4×4 Jacobians", [
        S("faster", "100 000 joints: one after the other over the scan, measured", "can outperform", above(1, "×"),
          "The tree does four times the work, and one core does all of it"),
        S("condition", "n / log₂ n from which on the scan's path is the shorter one", "above the dimension: 4",
          near(4)),
        S("same", "gradients by the scan and one after the other, 1000 joints: largest relative difference",
          "the same outputs", at_most(1e-12))],
), (
    "monte-carlo", "§5", "executed", "Monte Carlo products of Jacobians", "columns drawn by their norms", [
        S("errors", "relative error of the gradient", "noticeable", at_least(10, " %")),
        S("trade-off", "a cheaper product slows the convergence", "a trade-off",
          holds("the loss rises at every step"))],
)), *_paper("OOO", (
    "fig1", "Fig. 1, 2 and 8", "elsewhere", "kernel issue overhead of DenseNet-121 on a V100", "", [
        S("issue", "issue overhead over execution, DenseBlock-3 and 4", "up to 4×", near(4), _NO_GPU),
        S("idle", "idle time between kernels", "1–2 µs, 3–13 %", between(3, 13), _NO_GPU)],
), (
    "alg1", "Alg. 1", "exact", "multi-region joint scheduling", "joint scheduling", [
        S("same", "our order of the second stream against Algorithm 1 as written, 200 random instances", "Algorithm 1",
          exact(200), "Where a kernel outlasts its region, ours moves the next region's time on; line 11 does not")],
), (
    "fig4", "Fig. 3, 4 and Alg. 2", "exact", "reverse first-k scheduling", "reverse first-k", [
        S("order", "order of the gradients, L = 5, k = 3", "δW₅ δO₅ δW₄ δO₄ δO₃ δO₂ (δO₁) δW₁ δW₂ δW₃",
          Rule("equal without δO₁", lambda ours: " ".join(ours) == "W5 I5 W4 I4 I3 I2 W1 W2 W3")),
        S("search", "search for k: steps of L / 10, then halved", "finds the optimal k",
          holds("of 200 concave throughputs")),
        S("saved", "Fig. 4: units saved by prioritised sums", "1", exact(1), "The text gives no durations"),
        S("further", "Fig. 4: and by reversing three layers, or four", "3", exact(3), "The text gives no durations"),
        S("ratios", "Fig. 4: over conventional and over prioritised", "1.16× and 1.12×", exact(1.16),
          "The text gives no durations")],
), (
    "fig5", "Fig. 5 and 6", "exact", "8 layers on 2 devices, units of time", "fast-forward, modulo allocation", [
        S("modulo", "modulo allocation", "16 units (1.44×)", exact(16)),
        S("fast-forward", "gradient fast-forwarding", "19 units (21 %)", exact(19)),
        S("conventional", "conventional", "23 units", exact(23)),
        S("utilised", "modulo: each GPU's share of the back-propagation", "more than 90 % both", above(90, " %"),
          "15 gradients on two devices in 8 units: 94 % together"),
        S("two micro-batches", "Fig. 6: units, conventional, fast-forward, modulo", "shorter each time", holds())],
), (
    "fig5-here", "Fig. 5, on two ranks", "measured", "an MLP of 8 layers, one micro-batch",
    "modulo", [
        S("modulo", "modulo over conventional", "1.44× (units)", at_least(1.44),
          "Layers and messages take unequal time"),
        S("fast-forward", "fast-forward over conventional", "1.21× (units)", at_least(1.21),
          "Layers and messages take unequal time")],
), (
    "table1", "Tables 1 and 2", "elsewhere", "networks, data and clusters", "", [
        S("clusters", "Titan XP, P100 and V100 in four clusters", "a list of machines", NOTHING)],
), (
    "fig7", "Fig. 7 and §8.2", "measured", "one device, over the conventional order (XLA)",
    "two streams, joint or list scheduling", [
        S("mean", "mean over all networks", "1.18×", at_least(1.18), _KERNELS),
        S("DenseNet", "DenseNet-121", "1.09–1.21×", at_least(1.09), _KERNELS),
        S("MobileNet", "MobileNet V3", "1.07–1.19×", at_least(1.07), _KERNELS),
        S("ResNet", "ResNet-50 and 101", "1.03–1.06×", at_least(1.03), "Not among the networks that are timed"),
        S("two streams", "DenseNet-121, two streams without reordering", "1.39×", at_least(1.39), _KERNELS),
        S("reordered", "DenseNet-121, the largest", "1.54×", at_least(1.54), _KERNELS),
        S("MobileNet most", "MobileNet α = 0.25, the largest", "1.58×", at_least(1.58), _NO_GPU),
        S("MobileNet 128", "MobileNet, batch 128", "1.04–1.09×", at_least(1.04), _NO_GPU),
        S("Opt2", "multi-stream ooo by itself (Opt2)", "1.01–1.15×", at_least(1.01), _NO_GPU),
        S("regions", "DenseNet-121, regions R2 and R5", "6 % and 10 %", at_least(6, " %"), _NO_GPU),
        S("Nimble", "over Nimble, mean", "1.28×", at_least(1.28), _NO_GPU),
        S("TensorFlow", "over TensorFlow", "1.2–4.9×", at_least(1.2), _NO_GPU)],
), (
    "fig7-here", "Fig. 7 and §8.2, other networks", "measured", "networks in which reordering could gain on two cores",
    "two streams, joint or list scheduling", [
        S("range", "the largest gain of three networks", "1.03–1.58×", at_least(1.03),
          "Weight gradients are too short"),
        S("barrier", "a layer's two gradients together, a barrier after each: the best of three networks",
          "not much, up to 3 %; may even degrade", between(0.97, 1.03),
          "A gradient on one core each is slower than both on two")],
), (
    "s8", "§8 and §9", "executed", "the semantics of the training do not change", "all orders of a step, MLP", [
        S("weights", "weights after five steps in every order", "unchanged", holds("bitwise equal"))],
), (
    "fig9", "Fig. 9 and §8.2", "simulated", "memory of the reordered step", "joint scheduling, measured costs", [
        S("peak", "peak memory over the conventional step's, the largest of all networks", "less than 0.1 % more",
          at_most(0.1, " %"), "Delayed weight gradients keep both of their operands")],
), (
    "fig10", "Fig. 10", "simulated", "data-parallel over BytePS", "reverse first-k, first stage first", [
        S(key, key.rpartition(",")[0] + f", {key.rpartition(', ')[2]} workers", said, rule, _SIMULATED)
        for key, said, rule in (
            ("V100: ResNet-50, 4 a node, 10 Gb, 16", "1.265×", gain(1.265)),
            ("Titan XP: ResNet-101, 10 Gb, 8", "1.153×", gain(1.153)),
            ("P100: ResNet-101, 20 Gb, 20", "1.271×", gain(1.271)),
            ("V100: ResNet-101, 4 a node, 10 Gb, 8", "1.198×", gain(1.198)),
            ("V100: ResNet-50, 4 a node, 10 Gb, 48", "1.1–1.27×", gain(1.1, 1.27)),
            ("V100: ResNet-50, NVLink, 4", "1.01–1.05×", gain(1.01, 1.05)))],
), (
    "fig10-here", "Fig. 10, on two ranks", "measured", "an MLP, 64 samples a step", "reverse first-k", [
        S("10 Gbit/s", "10 Gbit/s between the ranks: over prioritised sums", "1.10–1.27× (16 to 48 GPUs)",
          at_least(1.1)),
        S("memory", "in this machine's memory: over prioritised sums", "1.01–1.05× (2 to 4 GPUs, NVLink)",
          between(1.01, 1.05))],
), (
    "s83", "§8.3", "simulated", "ResNet-50 on 16 V100", "reverse first-k, first stage first", [
        S("gain", "total speed-up", "27 %", gain(1.27), _RINGS),
        S("wait", "synchronisation of the first layer, not hidden", "350 ms", near(350), _RINGS),
        S("k", "layers that are reversed", "45", near(45), _RINGS),
        S("weights", "weight gradients of layers 2 to 45", "85 ms", near(85),
          "By FLOPs, at one rate for all convolutions"),
        S("less", "350 ms less those", "265 ms", near(265), _RINGS),
        S("more", "further overlap of layers 2 to 20", "65 ms", near(65), _RINGS),
        S("left", "communication that is left", "200 ms", near(200), _RINGS),
        S("memory", "additional memory", "less than 1 %", at_most(1, " %")),
        S("Horovod", "over Horovod, Titan XP and P100", "1.89× and 3.5×", gain(1.89), "Horovod is not simulated"),
        S("small", "DenseNet and MobileNet", "up to 10 % and 5.3 %", gain(1.1), "Their layers are not simulated")],
), (
    "fig11", "Fig. 11 and 13", "simulated", "pipelines over GPipe", "modulo allocation", [
        S("modulo; BERT-24, NVLink, 4", "BERT-24, NVLink, 4 GPUs", "1.59× (a), 1.70× (b)", gain(1.59, 1.70),
          _SIMULATED),
        S("fast-forward; BERT-24, NVLink, 4", "fast-forward alone, BERT-24, NVLink, 4 GPUs", "1.15×", gain(1.15),
          _SIMULATED),
        S("modulo; BERT-24, PCIe, 4", "BERT-24, PCIe, 4 GPUs", "1.58×", gain(1.58), _SIMULATED),
        S("modulo; BERT-24, 10 Gb Ethernet, groups of 2, 4", "BERT-24, 10 Gb Ethernet, groups of two, 4 GPUs", "1.48×",
          gain(1.48), _SIMULATED),
        S("modulo; BERT-12, 8 a node, 25 Gb, 8", "BERT-12, 8 GPUs", "1.73×", gain(1.73), _SIMULATED),
        S("modulo; BERT-24, 8 a node, 25 Gb, 16", "BERT-24, 16 GPUs", "1.41–1.45×", gain(1.41, 1.45), _SIMULATED),
        S("modulo; BERT-48, 8 a node, 25 Gb, 32", "BERT-48, 32 GPUs", "1.41–1.45×", gain(1.41, 1.45), _SIMULATED),
        S("modulo, 32 workers over 8; BERT-48, 8 a node, 25 Gb, 32", "BERT-48, 32 GPUs over 8", "2.5×", gain(2.5),
          _SIMULATED)],
), (
    "fig11-here", "Fig. 11a, on two ranks", "measured", "an MLP over GPipe (the paper's FFNN)", "modulo, fast-forward",
        [
        S("modulo", "modulo over GPipe", "1.5×", at_least(1.5), "8 layers on 2 ranks: GPipe's bubble is only 15 %"),
        S("fast-forward", "fast-forward over GPipe", "1.18×", at_least(1.18),
          "8 layers on 2 ranks: GPipe's bubble is only 15 %")],
), (
    "fig11-rnn", "Fig. 11a, on two ranks", "measured", "GRU of 16 cells", "modulo, one micro-batch", [
        S("GPipe", "over GPipe with four micro-batches", "1.99×", at_least(1.99),
          "Two ranks with a core each, not four V100"),
        S("cross-layer", "over cross-layer model parallelism", "1.47×", at_least(1.47),
          "Two ranks with a core each, not four V100"),
        S("slower", "GPipe is slower than cross-layer parallelism: its time over the other's", "slower", above(1, "×"),
          "These ranks run layer by layer")],
), (
    "s84", "§8.4", "simulated", "BERT: other systems, communication, memory", "modulo allocation", [
        S("PipeDream", "over PipeDream, mean", "1.31×", gain(1.31), _DREAM),
        S("PipeDream 8", "over PipeDream, BERT-12, 8 GPUs", "1.63×", gain(1.63), _DREAM),
        S("PipeDream 16, 32", "over PipeDream, 16 and 32 GPUs: the larger", "1.14–1.25×", gain(1.14, 1.25), _DREAM),
        S("DAPPLE 8", "over DAPPLE (1F1B), BERT-48, 8 GPUs", "1.47×", gain(1.47), _SIMULATED),
        S("DAPPLE 16", "over DAPPLE (1F1B), BERT-48, 16 GPUs", "1.29×", gain(1.29), _SIMULATED),
        S("Megatron low", "over Megatron 2 (interleaved 1F1B): the least", "1.136×", gain(1.136), _SIMULATED),
        S("Megatron high", "over Megatron 2: the most", "1.292×", gain(1.292), _SIMULATED),
        S("forwarding mean", "fast-forward in Megatron 2, mean", "1.204×", gain(1.204), _SIMULATED),
        S("forwarding most", "fast-forward in Megatron 2, the most", "1.275×", gain(1.275), _SIMULATED),
        S("one GPU", "BERT-24 on four GPUs over one", "3.2×", gain(3.2), _SIMULATED),
        *(S(f"transfer {link}", f"BERT-24, {link}: communication over computation", f"{value:g}", near(value),
            "By nominal bandwidth and FLOPs") for link, value in (("NVLink", 0.05), ("PCIe", 0.16), ("10 Gb Ethernet",
                1.8))),
        S("groups", "10 Gb Ethernet: single encoders over groups of two", "half the throughput", near(0.5), _SIMULATED),
        S("memory fast-forward", "BERT: memory of fast-forward over GPipe", "11 % more", near(11), _SIMULATED),
        S("memory modulo", "BERT: memory of modulo over GPipe", "similar", at_most(2, " %"), _SIMULATED),
        S("hybrid", "with data parallelism too, DAPPLE and ours", "30–35 % more", between(30, 35), "Not simulated"),
        S("GPT-3", "GPT-3 on 12 to 36 GPUs", "limited by 24 decoders", holds(), "Not simulated")],
), (
    "fig12", "Fig. 12 and §8.4.1", "exact", "16 layers, 4 devices, 4 micro-batches, units of time",
    "fast-forward, modulo allocation", [
        S("modulo", "modulo over GPipe", "1.62×", exact(1.62), "83 / 51 units: 1.62 if it is cut off, 1.63 if rounded"),
        S("fast-forward", "fast-forward over GPipe", "1.22×", exact(1.22))],
)), *_paper("SpecTrain", (
    "fig3", "Fig. 1–3", "simulated", "bytes between four GPUs a batch, by the networks' shapes",
    "data-parallel by a server, stages of equal FLOPs", [
        S("mean", "data-parallel over model-parallel, geometric mean", "13.4×", near(13.4),
          "Five networks; the paper does not say how it counts"),
        S("largest", "the largest", "528×", near(528)),
        S("more", "data-parallel moves more, in all but Inception v4", "more", holds("all five")),
        S("Inception", "Inception v4", "less", holds(), "The size of its images is not stated")],
), (
    "fig4", "Fig. 4 and 11", "simulated", "shares of a step on four P40", f"{_DUAL}, PipeDream, data-parallel", [
        S("data-parallel", "transfers, data-parallel, mean", "26.7 %", near(26.7), _SIMULATED),
        S("largest", "transfers, data-parallel, the largest", "76.6 %", near(76.6), _SIMULATED),
        S("recurrent", "transfers, data-parallel, FCN/RNN", "49.8 %", near(49.8), _SIMULATED),
        S("PipeDream", "transfers, PipeDream, mean", "1.9 %", near(1.9), _SIMULATED),
        S("DualPipe", "transfers, DualPipe, mean", "2.2 %", near(2.2), _SIMULATED),
        S("uneven", "idle by imbalance, PipeDream, mean", "38.6 %", near(38.6), _SIMULATED),
        S("even", "idle by imbalance, DualPipe, mean", "11.5 %", near(11.5), _SIMULATED),
        S("computing", "computing, data-parallel over pipelines", "61.1 % longer", near(61.1),
          "The simulator counts FLOPs: small batches use a GPU as well")],
), (
    "fig6", "Fig. 6", "exact", "timeline of DualPipe on four devices", _DUAL, [
        S("forward", "units from a batch's entry to its forward on each device", "0, 1, 2, 3", exact([0, 1, 2, 3])),
        S("backward", "units to its backward on the first device", "2N − 2 = 6", exact(6))],
), (
    "fig7", "Fig. 7", "measured", "time of a backward over a forward", "bp, one stream", [
        S("largest", "the largest of six networks", "3.3×", near(3.3), "Other networks and kernels, on a CPU"),
        S("longer", "the smallest of six networks", "a backward takes more", above(1, "×"))],
), (
    "fig8", "Fig. 8", "exact", "the round trip of a batch on three devices", _DUAL, [
        S("versions", "version differences on the way", "W₅ to W₉: 4, 3, 2, 1, 0", exact([4, 3, 2, 1, 0])),
        S("units", "units from the first forward to the last backward", "5th to 9th: 0 to 4", exact([0, 1, 2, 3, 4])),
        S("PipeDream", "PipeDream: one version on the whole way", "W₅ in every stage",
          holds("forward and backward alike"))],
), (
    "eq5", "Eq. 5 and 6", "exact", "version differences of 2 to 8 devices", _DUAL, [
        S("forward", "forward", "s = 2N − k − 2", holds("equal on all devices")),
        S("backward", "backward", "s = k", holds("equal on all devices"))],
), (
    "alg1", "Alg. 1, Eq. 1 and 4", "exact", "DualPipe's program flow with predicted weights, 4 devices, 24 batches",
        _SPEC, [
        S("weights", "weights of our pipeline against Algorithm 1 as written: largest difference", "Algorithm 1",
          at_most(1e-12))],
), (
    "fig9", "Fig. 9", "executed", "an SNN on four devices: errors of predicted and of stale weights", _SPEC, [
        S("lower", "RMSE of predicted over stale weights: the largest of s = 1, 2, 3", "apparently lower", below(1)),
        S("always", "steps at which the predicted weights are nearer: the least", "always", at_least(100, " %"),
          "The direction of a step changes"),
        S("grows", "RMSE of stale weights, s = 1, 2, 3", "increases with s", holds()),
        S("spikes", "the stale error's largest spike over its mean", "above 1000×", at_least(1000, "×"),
          "No radical changes here"),
        S("s = 3", "s = 3: RMSE of predicted over stale weights", "1.5 %", at_most(1.5, " %"),
          "It comes from the spikes")],
), (
    "fig9-nets", "Fig. 9, footnote 3", "executed", "other models: errors of predicted weights", _SPEC, [
        S("similar", "RMSE of predicted over stale weights, forward: the largest", "similar results", below(1))],
), (
    "table1", "Table 1", "executed", "SNN: best losses and accuracy, minus data-parallel training's", _SPEC, [
        S("SpecTrain accuracy", "SpecTrain: accuracy (staleness costs 2.1 % on average)", "+2.24 points: no drop",
          Rule("no drop of 2.1 points", lambda ours: ours > -2.1)),
        S("vanilla accuracy", "vanilla DualPipe: accuracy", "−0.03 points", points(-0.03)),
        S("stashing accuracy", "PipeDream: accuracy", "−0.40 points", points(-0.4)),
        *(S(f"{side} {loss} loss", f"{name}: least {what} loss", f"{value:+.3f}".replace("-", "−"), near(value, 0.5))
          for loss, what, values in (("train", "training", (0.412, 0.511, 0.310)), ("val", "validation", (-0.106,
              -0.044, 0.007)))
          for (side, name), value in zip((("SpecTrain", "SpecTrain"), ("vanilla", "vanilla DualPipe"),
                                          ("stashing", "PipeDream")), values, strict=True)),
        *(S(name, f"SpecTrain, {name}: accuracy", f"{value:+.2f} points".replace("-", "−"), points(value),
            "Too long for this machine")
          for name, value in (("VGG16", 0.56), ("ResNet-152", -0.95), ("Inception v4", 1.07), ("Transformer", 0.04),
                              ("Residual LSTM", -2.22)))],
), (
    "hard", "Table 1, means", "executed", "accuracy minus synchronous, mean of 4 networks at 2 rates, 60 to 250 steps",
    "DualPipe (2018) and PipeDream in four stages", [
        S("SpecTrain", "SpecTrain", "no drop in almost all", Rule("no drop of 2.1 points", lambda ours: ours > -2.1),
          "Few steps of batch 32, where staleness hurts"),
        S("vanilla", "vanilla DualPipe", "2.1 % on average", points(-2.1),
          "Few steps of batch 32, where staleness hurts"),
        S("stashing", "PipeDream", "1.7 % on average", points(-1.7), "Few steps of batch 32, where staleness hurts")],
), (
    "fig13", "Fig. 13", "simulated", "time to convergence: steps trained here to a common accuracy, timed on four P40",
    _SPEC, [
        S("FCN/RNN", "FCN/RNN: over data-parallel's and PipeDream's", "14.9 % and 36.1 %", near(14.9),
          "Only the SNN is trained"),
        S("all", "six networks: over data-parallel's and PipeDream's", "33.8 % and 42.1 %", near(33.8),
          "Only the SNN is trained"),
        S("CNN", "CNN: over data-parallel's and PipeDream's", "76.9 % and 49.1 %", near(76.9),
          "Only the SNN is trained")],
), (
    "fig12", "Fig. 5 and 12", "executed", "learning curves of a Transformer: losses at step 150 of 5000, two rates",
    _SPEC, [
        S("synchronous", "SpecTrain's loss over data-parallel's: the larger", "similar", at_most(1.05),
          "Stale weights are far off at these rates, which are not the paper's"),
        S("vanilla", "SpecTrain's loss over vanilla DualPipe's: the larger", "lower (Table 1: 0.654, 0.667)", below(1)),
        S("stashing", "SpecTrain's loss over PipeDream's: the larger", "lower (Table 1: 0.654, 0.663)", below(1),
          "Stashing ends lower here"),
        S("stability", "mean change of the loss: vanilla DualPipe's is larger than PipeDream's", "the least stable",
          holds(),
          "PipeDream's losses, which fall further, move more")],
), (
    "fig10", "Fig. 10", "simulated", "throughput on P40", _DUAL, [
        S("data-parallel all, mean", "four GPUs: over data-parallel, geometric mean", "2.64×", gain(2.64), _SIMULATED),
        S("data-parallel the largest", "over data-parallel: the largest", "15.77×", gain(15.77), _SIMULATED),
        S("data-parallel CNN, mean", "over data-parallel: CNN", "1.213×", gain(1.213), _SIMULATED),
        S("data-parallel FCN/RNN, mean", "over data-parallel: FCN/RNN", "5.817×", gain(5.817), _SIMULATED),
        S("PipeDream all, mean", "over PipeDream: geometric mean", "1.68×", gain(1.68), _SIMULATED),
        S("PipeDream the largest", "over PipeDream: the largest", "2.18×", gain(2.18), _SIMULATED),
        S("PipeDream CNN, mean", "over PipeDream: CNN", "1.517×", gain(1.517), _SIMULATED),
        S("PipeDream FCN/RNN, mean", "over PipeDream: FCN/RNN", "1.849×", gain(1.849), _SIMULATED),
        S("falls", "FCN/RNN, data-parallel: speed-up on two and on four GPUs", "falls in all three", holds(),
          _SIMULATED),
        S("rises", "CNN, data-parallel: speed-up on two and on four GPUs", "increases",
          holds("both, without Inception v4")),
        S("scales", "DualPipe: speed-up on two and on four GPUs", "increases", holds("all five")),
        S("38.5", "FCN/RNN, data-parallel on four GPUs: of one GPU's throughput", "38.5 %", near(38.5), _SIMULATED)],
)), *_paper("Fusion", (
    "depth", "Fig. 1 and §3", "exact", "depth of a step's graph, unit costs", "orders of a step", [
        S("backward", "backward-fusion", "2n + 1", holds("equal for four n")),
        S("baseline", "baseline", "3n", holds("equal for four n"))],
), (
    "table1", "Table 1", "exact", "locality, parallelism, global information",
        "orders of a step; clipping by the global norm", [
        S("forward", "forward-fusion", "✓ × ✓", exact((True, False, True))),
        S("backward", "backward-fusion", "✓ ✓ ×", exact((True, True, False))),
        S("baseline", "baseline", "× × ✓", exact((False, False, True)))],
), (
    "alg23", "Alg. 2 and 3, App. B", "executed", "a layer used three times, Adam", "forward- and backward-fusion", [
        S("results", "weights after 20 steps, against the baseline's", "do not affect the results",
          holds("bitwise equal")),
        S("once", "updates of a layer that is used several times", "once a step", holds("equal"))],
), (
    "fig2", "Fig. 2", "elsewhere", "memory transactions that fusion merges", "", [
        S("transactions", "a diagram", "no number", NOTHING)],
), (
    "fig3", "Fig. 3 and Table 2", "measured", "MobileNetV2, batch 32, Adam", "ours, updates fused", [
        S("backward", "backward-fusion", "1.10–1.26× (1.16× in Fig. 3)", at_least(1.1)),
        S("forward", "forward-fusion", "1.11–1.17× (1.12× in Fig. 3)", at_least(1.11)),
        S("growth", "growth of the backward over the optimizer's time", "3.32 of 16.70 ms: 0.20", at_most(0.2))],
), (
    "fig4", "Fig. 4 and App. C.2", "measured", "MobileNetV2: time saved by batch", "ours, updates fused", [
        S(way, f"{way}-fusion: range of the time saved, in updates", "independent of the batch", at_most(0.25),
          "It depends on the batch") for way in ("backward", "forward")],
), (
    "fig5", "Fig. 5 and App. C.2", "measured", "MobileNetV2: speed-up over the batch", "ours, updates fused", [
        S("reduction", "the largest reduction of a step's time, any network", "up to 20 %", at_least(20, " %")),
        *(S(way, f"{way}-fusion: B = 1, 8, 32", "below 1, then above, then falling", holds(),
            "There are no Python hooks to pay for at small batches") for way in ("backward", "forward")),
        S("hooks", "backward-fusion by hooks in PyTorch, as in App. C.1: B = 1, 8, 32",
          "below 1, then above, then falling",
          holds(), "A Python hook for every parameter costs more than it saves"),
        S("converge", "largest batch: time of forward- over backward-fusion", "the two converge",
          Rule("within 5 %", lambda ours: abs(ours) <= 5))],
), (
    "fig6", "Fig. 6", "measured", "speed-up by model, batch 32", "ours, updates fused", [
        *(S(f"{way} trend", f"{way}-fusion: parameters a layer against the gain, rank correlation", "fewer, faster",
            below(0)) for way in ("backward", "forward")),
        *(S(f"{way} most", f"{way}-fusion: the network that gains most", "MobileNetV2", holds())
          for way in ("backward", "forward"))],
), (
    "fig7", "Fig. 7", "measured", "speed-up by optimizer, MobileNetV2, batch 32", "ours, updates fused", [
        *(S(f"{way} gain", f"{way}-fusion: six optimizers", "all gain", above(1, "×")) for way in ("backward",
          "forward")),
        *(S(f"{way} trend", f"{way}-fusion: the update's share against the gain, rank correlation", "increasing",
          above(0))
          for way in ("backward", "forward"))],
), (
    "transformer", "App. C.4", "measured", "Transformer (base)", "ours, updates fused, Adam", [
        S("forward", "forward-fusion", "1.030×", at_least(1.03)),
        S("backward", "backward-fusion", "1.019×", at_least(1.019))],
), (
    "ddp", "App. C.5", "elsewhere", "distributed data-parallel training", "", [
        S("similar", "speed-up", "similar to one GPU's", holds(), "It needs several GPUs")],
))]  # fmt: skip
"""In the order of the papers."""
