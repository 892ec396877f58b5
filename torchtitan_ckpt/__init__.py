"""torchtitan_ckpt: checkpoints for torchtitan and torchtitan-npu."""
