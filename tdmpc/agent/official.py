"""The published checkpoint format and ours, in both directions.

The published file is `{"model": state_dict}`. Its keys are ours under other prefixes, and its latent features are
grouped as neighbours where ours lie at a stride (see `SimNorm`): every layer that makes or reads a latent has its
rows or columns permuted. Termination and Q heads, online and target, are alike; copies that the published code
keeps of the Q heads for its own use are dropped, and made again on export.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_PREFIXES = {
    "_encoder.state.": "encoder.",
    "_dynamics.": "dynamics.",
    "_reward.": "reward.",
    "_termination.": "termination.",
    "_pi.": "policy.",
    "_Qs.params.": "q.",
    "_target_Qs_params.": "target_q.",
}
# What no shape tells is the same in all published models.
_LOG_STD_MIN, _LOG_STD_RANGE = -10.0, 12.0
# The first published files number the tensors of the Q heads instead of naming them.
_NUMBERED = re.compile(r"_(target_)?Qs\.params\.(\d+)")
_TENSORS_OF_A_LAYER = ("weight", "bias", "ln.weight", "ln.bias")
_NOT_IN_SHAPES = {"simnorm_dim": 8, "vmin": -10.0, "vmax": 10.0}


def is_published(state: Mapping[str, Any]) -> bool:
    """Tell whether a state dict has the published keys."""
    return any(str(key).startswith("_dynamics.") for key in state)


def from_published(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `TDMPC2.weights` would for a published state dict.

    Its sizes are read off the shapes. The running scale, which the published file lacks, starts at 1; so does
    the lifetime at 0.

    Args:
        state: the published state dict, `torch.load(...)["model"]`.

    Raises:
        ValueError: the file is of a multi-task or a pixel model, or lacks a network.
    """
    foreign = [key for key in state if key.startswith(("_task_emb", "_encoder.rgb", "_action_masks"))]
    if foreign:
        raise ValueError(f"only single-task models of state observations can be loaded, and it has {foreign[0]}")
    # Files written by some versions of tensordict hold its batch size and device among the weights.
    ours = {_rename(_named(key), _PREFIXES): value for key, value in state.items() if isinstance(value, Tensor)}
    ours.pop("", None)
    try:
        network = _infer_sizes(ours) | _NOT_IN_SHAPES
    except KeyError as error:
        raise ValueError(f"it has no {error.args[0]}") from None
    low = float(state.get("log_std_min", _LOG_STD_MIN))
    network |= {"log_std_min": low, "log_std_max": low + float(state.get("log_std_dif", _LOG_STD_RANGE))}
    return {
        "network": network,
        "model": _permute_latents(ours, network["simnorm_dim"], to_strided=True),
        "scale": torch.ones(()),
        "lifetime": {"steps": 0, "updates": 0},
    }


def to_published(weights: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the published state dict for `TDMPC2.weights`; `torch.save({"model": ...})` makes the file."""
    network = weights["network"]
    prefixes = {ours: theirs for theirs, ours in _PREFIXES.items()}
    strided = _permute_latents(weights["model"], network["simnorm_dim"], to_strided=False)
    published = {_rename(key, prefixes): value for key, value in strided.items()}
    copies = {
        key.replace("_Qs.params.", "_detach_Qs_params."): value
        for key, value in published.items()
        if key.startswith("_Qs.params.")
    }
    low, high = network["log_std_min"], network["log_std_max"]
    limits = {"log_std_min": torch.tensor(low), "log_std_dif": torch.tensor(high - low)}
    return {**limits, **published, **copies}


def _infer_sizes(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Read the sizes of the networks off the shapes of our state dict."""
    enc_dim, observation_size = state["encoder.0.weight"].shape
    latent_dim = state[f"{_last_layer(state, 'dynamics')}.weight"].shape[0]
    num_q, mlp_dim, _ = state["q.0.weight"].shape
    return {
        "observation_size": observation_size,
        "action_size": state["dynamics.0.weight"].shape[1] - latent_dim,
        "episodic": "termination.0.weight" in state,
        "enc_dim": enc_dim,
        "num_enc_layers": _last_index(state, "encoder") + 1,
        "mlp_dim": mlp_dim,
        "latent_dim": latent_dim,
        "num_q": num_q,
        "num_bins": state[f"{_last_layer(state, 'reward')}.weight"].shape[0],
    }


def _named(key: str) -> str:
    match = _NUMBERED.fullmatch(key)
    if not match:
        return key
    layer, tensor = divmod(int(match[2]), len(_TENSORS_OF_A_LAYER))
    prefix = "_target_Qs_params" if match[1] else "_Qs.params"
    return f"{prefix}.{layer}.{_TENSORS_OF_A_LAYER[tensor]}"


def _rename(key: str, prefixes: Mapping[str, str]) -> str:
    for old, new in prefixes.items():
        if key.startswith(old):
            return new + key.removeprefix(old)
    return ""


def _permute_latents(state: Mapping[str, Tensor], group_size: int, *, to_strided: bool) -> dict[str, Tensor]:
    """Reorder the latent features in every layer that makes or reads them."""
    makers = {name: _last_layer(state, name) for name in ("encoder", "dynamics")}
    latent_dim = state[f"{makers['dynamics']}.weight"].shape[0]
    order = torch.arange(latent_dim).view(-1, group_size).T.flatten()
    if not to_strided:
        order = order.argsort()
    readers = {f"{name}.0.weight" for name in ("dynamics", "reward", "termination", "policy", "q", "target_q")}
    permuted = {}
    for key, value in state.items():
        if key.startswith(tuple(f"{layer}." for layer in makers.values())):
            value = value[order]
        if key in readers:
            value = torch.cat([value[..., order], value[..., latent_dim:]], -1)
        permuted[key] = value.clone()
    return permuted


def _last_layer(state: Mapping[str, Tensor], network: str) -> str:
    return f"{network}.{_last_index(state, network)}"


def _last_index(state: Mapping[str, Tensor], network: str) -> int:
    indices = [int(key.split(".")[1]) for key in state if key.startswith(f"{network}.")]
    if not indices:
        raise KeyError(network)
    return max(indices)
