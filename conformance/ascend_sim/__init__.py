"""A simulated Ascend device: the real torch_npu on a small stand-in for the CANN runtime.

    from conformance import ascend_sim
    problem = ascend_sim.why_not()          # None, or one sentence with its remedy
    code = ascend_sim.run(["python", "-m", "pytest", "tests/device"])

torch_npu lives in an environment of its own, because beside torch and without CANN it breaks plain
`import torch`. Results are always said to come from a "simulated Ascend device (real torch_npu,
simulated CANN)": kernels, rounding, timing and drivers are not Ascend's.
"""

from conformance.ascend_sim.launcher import Simulator, again, environment, find, run, why_not

__all__ = ["Simulator", "again", "environment", "find", "run", "why_not"]
