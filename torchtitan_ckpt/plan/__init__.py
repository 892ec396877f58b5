"""What a job would write and read under given parallel degrees, without the hardware.

`state` lists a job's tensors, `write` and `read` split them as DCP would, `dcp` asks DCP's own
planners, `plans` puts the two together and `text` shows them.
"""

from torchtitan_ckpt.plan.plans import LoadPlan, SavePlan, plan_load, plan_save, share

__all__ = ["LoadPlan", "SavePlan", "plan_load", "plan_save", "share"]
