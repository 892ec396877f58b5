"""What a training job is made of, as flat state dicts.

- `model`: parameters and buffers of all model parts
- `optimizer` (saving, planning) and `optimizer_load`; `swapped`: optimizers whose moments lie
  elsewhere; `hyperparameters`, `forms`, `slots`, `takeover`: their parts
- `scheduler`, `dataloader`, `objects`, `rng`: everything else
- `staging`: a copy on the host that a background save may write
- `names`, `leaves`, `tensors`: what they share
"""
