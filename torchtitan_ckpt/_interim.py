"""Interim: plain objects and schedulers until state/ has them."""
from torchtitan_ckpt.state.leaves import flatten, default_node, rebuild
def object_state_dict(obj):
    flat, node = flatten(obj.state_dict())
    if node != default_node(flat):
        flat["@layout"] = node
    return flat
def load_object_state(obj, values):
    values = dict(values)
    node = values.pop("@layout", None) or default_node(values)
    obj.load_state_dict(rebuild(node, values.__getitem__))
def scheduler_state_dict(s):
    s = s if hasattr(s, "state_dict") else list(s)[0]
    flat, _ = flatten({k: v for k, v in s.state_dict().items() if k != "lr_lambdas"})
    return flat
def load_scheduler_state(s, values):
    ss = [s] if hasattr(s, "state_dict") else list(s)
    for x in ss:
        x.load_state_dict(rebuild(default_node(values), values.__getitem__) | {"lr_lambdas": [None]*8})
class Stager:
    def __init__(self, pin=False): pass
    def snapshot(self, flat):
        import copy
        return {k: (v.detach().clone() if hasattr(v, "detach") else copy.deepcopy(v)) for k, v in flat.items()}
    def wait(self): pass
    def close(self): pass
def agree(flat, group): pass
