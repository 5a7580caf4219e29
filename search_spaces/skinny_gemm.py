"""The space of the skinny product (M <= 8), read by the Triton and the HIP family.

What each shared parameter becomes in layout `nk` (weights are N rows of K):

| parameter | Triton                                          | HIP                                             |
| --------- | ----------------------------------------------- | ----------------------------------------------- |
| `cpt`     | `BLOCK_K = cpt * warp * warps * unroll`           | weights that one load instruction brings        |
| `rows`    | rows of the program's tile                      | rows that a workgroup owns                      |
| `warps`   | `num_warps`                                       | `warp * warps` threads a workgroup              |
| `split_k` | programs along K; the last to end adds the parts | workgroups along K; the last to end adds the parts |
| `unroll`  | see `cpt`                                        | loads of one row that are in flight together    |
| `m_spec`  | kernel specialised to M=1, or for M <= 8        | the same                                        |

Triton chooses the width of its loads itself; the width that is found in the compiled code is in the receipt. Its
`num_stages` is the depth of the K loop's pipeline or, with `pdl` and a short loop, the blocks loaded before the wait.
"""

from __future__ import annotations

from tuner.arms import Arm, Config, Target, Value
from tuner.problem import Problem
from tuner.space import Constraint, Parameter, Space

IN_FLIGHT = 512
TRITON_TILE = 1 << 20

_SHARED = (
    Parameter("layout", ("nk",), "how the weights lie: nk = N rows of K, as torch's nn.Linear holds them"),
    Parameter("cpt", (1, 2, 4, 8, 16), "contiguous weights that a thread loads at once"),
    Parameter("rows", (1, 2, 4, 8, 16), "output rows that a workgroup owns"),
    Parameter("warps", (1, 2, 4, 8, 16), "warps of a workgroup"),
    Parameter("split_k", (1, 2, 4, 8), "workgroups that share one output along K"),
    Parameter("unroll", (1, 2, 4), "loads of one row that are in flight together"),
    Parameter("m_spec", (True, False), "specialised to M=1, or general to M=8"),
)
_PDL = Parameter("pdl", (False, True), "programmatic dependent launch: NVIDIA sm_90 and later")
_CACHE = Parameter("cache", ("default", "stream"), "weights kept in cache as usual, or marked as read once: GPUs")
_STAGES = Parameter("num_stages", (1, 2, 3), "software pipeline depth of the K loop: Triton")
_WAVES = Parameter("waves_per_eu", (0, 1, 2, 4), "waves a SIMD to aim for, 0 = the compiler's choice: AMD")

_CONSTRAINTS = (
    Constraint(
        "aligned",
        "cpt divides K, else the rows are not aligned for loads of cpt weights",
        lambda c, p, t: p.shape.k % int(c["cpt"]) == 0,
    ),
    Constraint("m1", "m_spec needs M=1", lambda c, p, t: p.shape.m == 1 or not c["m_spec"]),
    Constraint(
        "threads",
        "warps * warp size is at most the threads that a workgroup can have",
        lambda c, p, t: int(c["warps"]) * t.warp <= t.max_threads,
    ),
    Constraint(
        "in_flight",
        f"rows * cpt * unroll is at most {IN_FLIGHT} weights a thread, else its registers cannot hold them",
        lambda c, p, t: int(c["rows"]) * int(c["cpt"]) * int(c["unroll"]) <= IN_FLIGHT,
    ),
    Constraint(
        "split",
        "split_k leaves every part at least one load: split_k * cpt <= K",
        lambda c, p, t: int(c["split_k"]) * int(c["cpt"]) <= p.shape.k,
    ),
)
_TILE = Constraint(
    "tile",
    f"rows * BLOCK_K (times 8 unless m_spec) is at most {TRITON_TILE:,} elements, Triton's limit of a tile",
    lambda c, p, t: tile_elements(c, t) <= TRITON_TILE,
)

_DEFAULTS: dict[tuple[str, str], dict[str, Value]] = {
    ("triton", "cuda"): {"rows": 1, "warps": 4, "unroll": 2, "cpt": 8},
    ("triton", "hip"): {"rows": 1, "warps": 4, "unroll": 2, "cpt": 8},
    ("hip", "cuda"): {"rows": 1, "warps": 8, "unroll": 2, "cpt": 8},
    ("hip", "hip"): {"rows": 1, "warps": 4, "unroll": 4, "cpt": 8},
    ("hip", "host"): {"rows": 8, "warps": 1, "unroll": 1, "cpt": 16},
}
# Above M=1 each row of weights meets several rows of activations, so rows are shared, or go to the matrix unit.
_DEFAULTS_ABOVE_M1: dict[tuple[str, str], dict[str, Value]] = {
    ("triton", "cuda"): {"rows": 16, "warps": 2, "unroll": 1, "cpt": 4, "num_stages": 3},
    ("triton", "hip"): {"rows": 16, "warps": 4, "unroll": 1, "cpt": 4, "num_stages": 2},
    ("hip", "cuda"): {"rows": 4, "warps": 4, "unroll": 1, "cpt": 8},
    ("hip", "hip"): {"rows": 4, "warps": 4, "unroll": 1, "cpt": 8},
    ("hip", "host"): {"rows": 8, "warps": 1, "unroll": 1, "cpt": 16},
}
# Arms that were among the best before on a kind of target; they are measured whatever the search proposes.
_KNOWN_GOOD: dict[tuple[str, str], tuple[dict[str, Value], ...]] = {
    ("triton", "cuda"): (
        {"rows": 1, "warps": 4, "unroll": 2, "cpt": 2, "cache": "stream", "pdl": True},
        {"rows": 4, "warps": 8, "unroll": 1, "cpt": 8, "cache": "stream", "pdl": True, "num_stages": 2},
    ),
    ("hip", "cuda"): (
        {"rows": 1, "warps": 4, "unroll": 2, "cpt": 2, "cache": "stream"},
        {"rows": 1, "warps": 8, "unroll": 2, "cpt": 8, "cache": "stream", "pdl": True},
    ),
    ("triton", "hip"): ({"rows": 1, "warps": 1, "unroll": 4, "cpt": 8},),
    ("hip", "hip"): ({"rows": 1, "warps": 1, "unroll": 4, "cpt": 8},),
}


def fixed(space: Space) -> tuple[Arm, ...]:
    """Arms of a space that are always measured: the default, at M=1 its general twin, and those known to be good."""
    configs: list[Config] = [space.default]
    if space.default["m_spec"]:
        configs.append({**space.default, "m_spec": False})
        known = _KNOWN_GOOD.get((space.family, space.target.backend), ())
        configs += [{**space.default, **{k: v for k, v in c.items() if k in space.default}} for c in known]
    return tuple(dict.fromkeys(space.arm(config) for config in configs if space.violated(config) is None))


def block_k(config: Config, warp: int) -> int:
    """Weights of one row that a workgroup covers in one pass."""
    return int(config["cpt"]) * warp * int(config["warps"]) * int(config["unroll"])


def tile_elements(config: Config, target: Target) -> int:
    """Elements of the largest tile that the Triton kernel forms."""
    return int(config["rows"]) * block_k(config, target.warp) * (1 if config["m_spec"] else 8)


def has_dependent_launch(target: Target) -> bool:
    """True where a launch may start before the one in front of it has ended (NVIDIA sm_90 and later)."""
    return target.backend == "cuda" and int(target.arch.removeprefix("sm_").rstrip("af")) >= 90


def space(family: str, problem: Problem, target: Target) -> Space:
    """The space of one family (`triton` or `hip`) for one problem on one target."""
    parameters = list(_SHARED)
    constraints = list(_CONSTRAINTS)
    if family == "triton":
        parameters.append(_STAGES)
        constraints.append(_TILE)
    if target.backend != "host":
        parameters.append(_CACHE)
    if has_dependent_launch(target):
        parameters.append(_PDL)
    if target.backend == "hip":
        parameters.append(_WAVES)
    return Space(
        family,
        "skinny_gemm",
        problem,
        target,
        tuple(parameters),
        tuple(constraints),
        _default(family, problem, target, parameters),
    )


def _default(family: str, problem: Problem, target: Target, parameters: list[Parameter]) -> dict[str, Value]:
    chosen = (_DEFAULTS if problem.shape.m == 1 else _DEFAULTS_ABOVE_M1)[family, target.backend]
    width = int(chosen["cpt"])
    while problem.shape.k % width:
        width //= 2
    values: dict[str, Value] = {p.name: p.values[0] for p in parameters}
    return {**values, **chosen, "cpt": width, "m_spec": problem.shape.m == 1}
