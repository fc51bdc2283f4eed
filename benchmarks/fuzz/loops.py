"""Draws a training loop, and writes it as text: an ordinary loop with lines of features at its places.

setup
for step:
    step_start
    for size:                       the micro-batches
        micro_start
        result = model(x)
        output
        loss = ..
        loss                        reads it, or makes another one of it
        backward                    one of BACKWARDS
        micro_end
    before_step
    optimizer.step()
    after_step
end
"""

from __future__ import annotations

import random
from typing import Any

from benchmarks.fuzz.models import is_called_twice, kinds_of, state_size

OPTIMIZERS = {
    "SGD": "torch.optim.SGD({}, lr=0.1)",
    "Momentum": "torch.optim.SGD({}, lr=0.05, momentum=0.9)",
    "Adam": "torch.optim.Adam({}, lr=0.01)",
    "AdamW": "torch.optim.AdamW({}, lr=0.01)",
    "Adagrad": "torch.optim.Adagrad({}, lr=0.05)",
    "Noisy": "Noisy({}, lr=0.1)",
    "LBFGS": "torch.optim.LBFGS({}, lr=0.1, max_iter=2)",
}
BACKWARDS = {
    "plain": ["loss.backward()"],
    "scaled": ["scaler.scale(loss).backward()"],
    "retained": ["out.abs().mean().mul(0.1).backward(retain_graph=True)", "loss.backward()"],
    "two losses": ["(loss * 0.5).backward(retain_graph=True)", "(loss * 0.25).backward()"],
    "late": ["total = total + loss"],
    "grad": [
        "params = [p for p in model.parameters() if p.requires_grad]",
        "for p, grad in zip(params, torch.autograd.grad(loss, params, allow_unused=True)):",
        "    if grad is not None:",
        "        p.grad = grad if p.grad is None else p.grad + grad",
    ],
}
CARRIES = {
    "detach": "state = {}",
    "detach_": "",
    "data": "state = {}",
}
FEATURES: dict[str, dict[str, list[str]]] = {
    "early backward": {"output": ["out.abs().mean().mul(0.1).backward(retain_graph=True)"]},
    "early cut": {"output": ["seen = out.detach().abs().mean()"], "before_step": ['record("early", seen.item())']},
    "output in place": {"output": ["out = out.mul_(0.5)"]},
    "output written": {"output": ["out = out.clone()", "out[:, 0] = out[:, -1].detach()"]},
    "output and its view": {
        "output": ["row = out[:, 0]", "out = out.mul_(0.5)"],
        "loss": ["loss = loss + 0.1 * row.square().mean()"],
    },
    "rates of loss": {
        "setup": ["rates, level = torch.ones(V), None"],
        "loss": ["loss = loss + 0.1 * (out * rates).mean()"],
        "micro_end": ["if level is not None:", "    rates.add_(level)"],
        "after_step": ["level = 0.1 * loss.detach()"],
    },
    "batch written": {"micro_end": ["x.zero_()", "y.zero_()"]},
    "thrown away": {
        "step_start": [
            "x, y = batch(2, generator)",
            "call(model, x).square().mean().backward()",
            "optimizer.zero_grad()",
        ]
    },
    "frozen between": {
        "loss": ["frozen = first(model)", "frozen.requires_grad_(False)"],
        "micro_end": ["frozen.requires_grad_(True)"],
    },
    "sets a global": {
        "micro_start": ['SETTINGS["gain"] *= 0.9'],
        "after_step": ['record("gain", SETTINGS["gain"])'],
    },
    "switches": {
        "micro_start": ["for m in model.modules():", "    if hasattr(m, 'is_cut'):", "        m.is_cut = not m.is_cut"]
    },
    "writes attributes": {
        "micro_start": [
            "for m in model.modules():",
            "    for value in vars(m).values():",
            "        if isinstance(value, torch.Tensor) and value.dim() and not value.requires_grad:",
            "            value[:1].mul_(0.9)",
        ]
    },
    "views of buffers": {
        "setup": ["views = [b[:1] for b in model.buffers() if b.dim()]"],
        "micro_start": ["old_buffers = [b.clone() for b in model.buffers()]"],
        "micro_end": ["seen_views = sum(view.sum() for view in views)"],
        "before_step": [
            'record("views", float(seen_views))',
            'record("old buffers", [b.sum().item() for b in old_buffers])',
        ],
    },
    "reads buffers": {"loss": ['record("buffers", [b.sum().item() for b in model.buffers()])']},
    "output read and written": {
        "output": ["row = out[:, 0]", 'record("row", row.sum().item())', "out = out.mul_(0.5)"],
        "loss": ["loss = loss + 0.1 * row.square().mean()"],
    },
    "marks": {
        "setup": ["for number, p in enumerate(model.parameters()):", "    p.factor = 1.0 - 0.01 * number"],
        "after_step": ["with torch.no_grad():", "    for p in model.parameters():", "        p.mul_(p.factor)"],
    },
    "old state dictionary": {
        "setup": ["kept_state = model.state_dict()"],
        "after_step": ['record("kept state", [value.sum().item() for value in kept_state.values()])'],
    },
    "reads some weights": {
        "after_step": ['record("some", [p.tolist() for p in list(model.parameters())[step % 2 :: 2]])']
    },
    "reads old gradients": {
        "after_step": ['record("old", [p.grad.tolist() for p in model.parameters() if p.grad is not None])']
    },
    "reads moments": {
        "after_step": [
            "kept_moments = [v for p in model.parameters() for v in optimizer.state.get(p, {}).values()]",
            'record("moments", [v.sum().item() for v in kept_moments if torch.is_tensor(v)])',
        ]
    },
    "reads under autocast": {
        "micro_end": ['with torch.autocast("cpu", torch.bfloat16):', '    record("under autocast", loss.item())']
    },
    "output chunks": {"output": ["out = torch.cat([part * 0.5 for part in out.chunk(2)])"]},
    "chosen rows": {"loss": ["loss = loss + 0.1 * out[y == 0].sum()"]},
    "mask of output": {"loss": ["loss = loss + out[out > 0].mean()"]},
    "part called": {"loss": ["loss = loss + last(model)(hidden.detach()).square().mean()"]},
    "first part called": {"loss": ["loss = loss + 0.1 * model.embed(x).square().mean()"]},
    "stops early": {"micro_end": ["if loss.item() > 1.0:", "    break"]},
    "new gradients": {
        "before_step": ["for p in model.parameters():", "    if p.grad is not None:", "        p.grad = p.grad * 2"]
    },
    "no first gradient": {"before_step": ["first(model).grad = None"]},
    "new data": {"after_step": ["for p in model.parameters():", "    p.data = p.data * 0.9"]},
    "sharpness": {
        "before_step": [
            "with torch.no_grad():",
            "    saved_w = [p.clone() for p in model.parameters()]",
            "    for p in model.parameters():",
            "        if p.grad is not None:",
            "            p.add_(p.grad, alpha=0.05)",
            "optimizer.zero_grad()",
            "call(model, x).square().mean().backward()",
            "with torch.no_grad():",
            "    for p, w in zip(model.parameters(), saved_w):",
            "        p.copy_(w)",
        ]
    },
    "gradient memory": {
        "setup": ["memory = {}"],
        "before_step": [
            "for name, p in model.named_parameters():",
            "    if p.grad is not None:",
            "        p.grad.add_(memory.get(name, torch.zeros_like(p)), alpha=0.5)",
            "        memory[name] = p.grad.detach().clone()",
        ],
    },
    "old outputs": {
        "setup": ["olds = []"],
        "loss": ["loss = loss + 0.1 * sum((out.mean() - old).square() for old in olds[-2:])"],
        "micro_end": ["olds.append(out.detach().mean())"],
    },
    "old outputs in a dictionary": {
        "setup": ["old_of = {}"],
        "loss": ["loss = loss + 0.1 * (out.mean() - old_of.get('mean', 0.0)).square()"],
        "micro_end": ["old_of['mean'] = out.detach().mean()"],
    },
    "reads loss at once": {"loss": ['record("at once", loss.item())']},
    "reads loss after backward": {"micro_end": ['record("after backward", loss.item())']},
    "reads output": {"loss": ['record("mean", out.detach().mean().item())']},
    "reads list": {"micro_end": ['record("list", out.detach()[0, 0].tolist())']},
    "reads array": {"micro_end": ['record("array", float(out.detach().float().numpy().sum()))']},
    "formats loss": {"micro_end": ['record("text", f"{loss:.6f}")']},
    "branch": {"loss": ["if out.mean() > 0:", "    loss = loss * 1.5"]},
    "clip norm": {"before_step": ['record("norm", nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())']},
    "divides gradients": {
        "before_step": [
            "unit = 1.0 + next(p.grad for p in model.parameters() if p.grad is not None).norm()",
            "for p in model.parameters():",
            "    if p.grad is not None:",
            "        p.grad.div_(unit)",
            'record("divided", [p.grad.norm().item() for p in model.parameters() if p.grad is not None])',
        ]
    },
    "clip value": {"before_step": ["nn.utils.clip_grad_value_(model.parameters(), 0.05)"]},
    "L2": {"loss": ["loss = loss + 1e-3 * sum(p.square().sum() for p in model.parameters())"]},
    "cut target": {
        "loss": [
            "goal = call(model, x.flip(0)).max(-1)[0].detach()",
            "loss = loss + (out.mean(-1) - goal).square().mean()",
        ]
    },
    "cut target in place": {
        "loss": [
            "goal = call(model, x.flip(0)).max(-1)[0].detach_()",
            "loss = loss + (out.mean(-1) - goal).square().mean()",
        ]
    },
    "second call": {"loss": ["loss = loss + 0.1 * call(model, x.flip(0)).square().mean()"]},
    "mean of outputs": {
        "setup": ["mean = torch.zeros(())"],
        "micro_end": ["mean = 0.9 * mean + 0.1 * out.detach().mean()"],
        "after_step": ['record("mean of outputs", mean.item())'],
    },
    "mean in place": {
        "setup": ["mean_of = torch.zeros(V)"],
        "micro_end": ["mean_of.mul_(0.9).add_(out.detach().mean((0, 1)), alpha=0.1)"],
        "after_step": ['record("mean in place", mean_of.tolist())'],
    },
    "forward hook": {
        "setup": [
            "means = {}",
            "def keep(module, args, result):",
            '    means["head"] = 0.5 * means.get("head", 0.0) + result.detach().mean()',
            "last(model).register_forward_hook(keep)",
        ],
        "after_step": ['record("hook", float(means.get("head", 0.0)))'],
    },
    "changing hooks": {
        "setup": [
            "given = []",
            "def change(module, args, result):",
            "    given.append(result.detach().mean())",
            "    return result * 0.9",
            "for m in model.modules():",
            "    if isinstance(m, nn.Linear):",
            "        m.register_forward_hook(change)",
        ],
        "after_step": ['record("given", [float(item) for item in given])'],
    },
    "parameter hook": {"setup": ["first(model).register_hook(lambda grad: grad * 0.5)"]},
    "accumulated hook": {
        "setup": ["first(model).register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5))"],
    },
    "output hook": {"loss": ["if out.requires_grad:", "    out.register_hook(lambda grad: grad * 0.5)"]},
    "kept gradient": {
        "loss": ["out.retain_grad()"],
        "micro_end": ['record("grad of output", out.grad.abs().sum().item())'],
    },
    "input gradient": {
        "micro_start": ["x = x.requires_grad_() if x.is_floating_point() else x"],
        "micro_end": ['record("grad of input", None if x.grad is None else x.grad.abs().sum().item())'],
    },
    "EMA": {
        "setup": ["ema = {name: p.detach().clone() for name, p in model.named_parameters()}"],
        "after_step": [
            "with torch.no_grad():",
            "    for name, p in model.named_parameters():",
            "        ema[name].mul_(0.9).add_(p, alpha=0.1)",
        ],
        "end": ['record("ema", [value.sum().item() for value in ema.values()])'],
    },
    "EMA copy": {
        "setup": ["twin = copy.deepcopy(model)"],
        "after_step": [
            "with torch.no_grad():",
            "    for mean_p, p in zip(twin.parameters(), model.parameters()):",
            "        mean_p.lerp_(p, 0.1)",
        ],
        "end": ['record("twin", [value.sum().item() for value in twin.parameters()])'],
    },
    "evaluates": {
        "after_step": [
            "model.eval()",
            "with torch.no_grad():",
            '    record("evaluated", call(model, x).mean().item())',
            "model.train()",
        ]
    },
    "evaluates inside": {
        "micro_end": ["model.eval()", "with torch.no_grad():", "    seen = call(model, x).mean()", "model.train()"],
        "before_step": ['record("inside", seen.item())'],
    },
    "freezes": {"step_start": ["first(model).requires_grad_(step % 2 == 0)"]},
    "loads": {
        "after_step": [
            "if step == 0:",
            "    saved = copy.deepcopy(model.state_dict())",
            "else:",
            "    model.load_state_dict(saved)",
        ]
    },
    "loads optimizer": {"after_step": ["optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))"]},
    "copies": {
        "after_step": ["other = copy.deepcopy(model)", 'record("copy", call(other, x).mean().item())'],
    },
    "catches": {
        "step_start": [
            "try:",
            "    call(model, torch.zeros(2, T, W + 1))",
            "except (RuntimeError, IndexError) as error:",
            '    record("caught", type(error).__name__)',
        ]
    },
    "schedules": {
        "setup": ["schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)"],
        "after_step": ["schedule.step()", 'record("rate", schedule.get_last_lr())'],
    },
    "reads gradients": {
        "before_step": ['record("grads", [p.grad.norm().item() for p in model.parameters() if p.grad is not None])']
    },
    "writes gradients": {
        "before_step": [
            "for p in model.parameters():",
            "    if p.grad is not None:",
            "        p.grad.mul_(0.5).add_(1e-3)",
        ]
    },
    "reads weights": {"after_step": ['record("weights", sum(p.detach().sum() for p in model.parameters()).item())']},
    "writes weights": {
        "after_step": ["with torch.no_grad():", "    for p in model.parameters():", "        p.mul_(0.99)"]
    },
    "draws": {"micro_start": ["x = x + 0.1 * torch.randn(x.shape) if x.is_floating_point() else x"]},
    "feeds back": {
        "setup": ["fed = torch.zeros(())"],
        "micro_start": ["x = x + fed if x.is_floating_point() else x"],
        "micro_end": ["fed = out.detach().mean()"],
    },
    "late loss": {
        "step_start": ["outs = []"],
        "micro_end": ["outs.append(out.detach().mean())"],
        "before_step": ['record("outs", torch.stack(outs).mean().item())'],
    },
    "auxiliary": {
        "loss": ["loss = loss + sum(m.aux for m in model.modules() if getattr(m, 'aux', None) is not None)"],
    },
    "learned scale": {
        "setup": ["scale = nn.Parameter(torch.ones(()))", 'optimizer.add_param_group({"params": [scale]})'],
        "loss": ["loss = loss * scale"],
        "after_step": ['record("scale", scale.item())'],
    },
    "doubled weights": {
        "before_step": [
            "for p in model.parameters():",
            "    p.data.mul_(2)",
            "with torch.no_grad():",
            "    doubled = call(model, x).mean()",
            "for p in model.parameters():",
            "    p.data.div_(2)",
            'record("doubled", doubled.item())',
        ]
    },
    "doubled forward": {
        "micro_start": ["first(model).data.mul_(2)"],
        "micro_end": ["first(model).data.mul_(0.5)"],
    },
    "larger embedding": {
        "after_step": [
            "if step == 0 and isinstance(model.embed, nn.Embedding):",
            "    old, wider = model.embed, nn.Embedding(V + 3, W)",
            "    with torch.no_grad():",
            "        wider.weight[:V] = old.weight",
            "    model.embed = wider",
            "    for group in optimizer.param_groups:",
            '        group["params"] = [wider.weight if p is old.weight else p for p in group["params"]]',
            "    optimizer.state[wider.weight] = {",
            "        key: torch.cat([value, torch.zeros(3, W)]) if getattr(value, 'ndim', 0) == 2 else value",
            "        for key, value in optimizer.state.pop(old.weight, {}).items()",
            "    }",
        ]
    },
    "layer twice, two backwards": {
        "loss": [
            "ahead, behind = model.embed(x), model.embed(x.flip(0))",
            "ahead.abs().mean().mul(0.1).backward(retain_graph=True)",
            "loss = loss + 0.1 * behind.abs().mean()",
        ]
    },
    "late attribute": {
        "micro_start": ["if step:", '    model.count = getattr(model, "count", 0) + 1'],
        "loss": ['loss = loss / (1 + getattr(model, "count", 0))'],
    },
    "modes": {"micro_end": ["model.train(not model.training)"], "after_step": ["model.train()"]},
    "keeps gradients": {"step_start": ["optimizer.zero_grad(set_to_none=False)"]},
    "step twice": {"before_step": ["optimizer.step()"]},
    "prints": {"after_step": ['print("step", step, loss.item())']},
    "penalty of hidden": {"loss": ["loss = loss + 1e-2 * hidden.square().mean()"]},
    "reads state of optimizer": {
        "end": [
            'states = [state for _, state in sorted(optimizer.state_dict()["state"].items())]',
            'record("optimizer", [v.sum().item() for s in states for _, v in sorted(s.items()) if torch.is_tensor(v)])',
        ]
    },
}
NOT_WITH_CLOSURE = (
    "learned scale",
    "step twice",
    "schedules",
    "reads state of optimizer",
    "larger embedding",
    "reads moments",
)
ADDS_CALLS = ("copies", "EMA copy")
GOES_WITH = {
    "Configured": "sets a global",
    "Switched": "switches",
    "PlainScale": "writes attributes",
    "BatchNorm": "views of buffers",
}
"""Features that are drawn more often where a block has a use for them."""


def draw_loop(rng: random.Random, model: dict[str, Any]) -> dict[str, Any]:
    """A loop for a model."""
    names = sorted(FEATURES)
    optimizer = "Noisy" if rng.random() < 0.03 else rng.choice(sorted({*OPTIMIZERS} - {"Noisy"}))
    if optimizer == "LBFGS" and rng.random() < 0.5:
        optimizer = "SGD"  # it calls its closure several times a step
    features = rng.sample(names, rng.choice((0, 1, 1, 2, 2, 3, 4)))
    if rng.random() < 0.08:
        features = [*features, *({"early backward"} - {*features})]
    belonging = {GOES_WITH[kind] for kind in sorted(kinds_of(model) & {*GOES_WITH}) if rng.random() < 0.4}
    features = [*features, *sorted(belonging - {*features})]
    if optimizer == "LBFGS":
        features = [name for name in features if name not in NOT_WITH_CLOSURE]
    micro_batches = rng.choice(([4], [2, 2], [3, 3], [4, 4], [2, 2, 2], [4, 2, 3], [2, 2, 2, 2]))
    if model["cells"]:
        micro_batches = [micro_batches[0]] * len(micro_batches)
    is_used_once = not (is_called_twice(model) or model["ties"])  # a weight's casts are added up: docs/limits.md
    return {
        "steps": rng.choice((2, 2, 3)),
        "micro_batches": micro_batches,
        "optimizer": optimizer,
        "split": rng.random() < 0.15 and optimizer != "LBFGS" and not {"learned scale"} & set(features),
        "backward": rng.choice((*sorted(BACKWARDS), "plain", "plain", "plain", "plain")),
        "loss": rng.choice(("mse", "cross entropy", "some targets")),
        "carry": rng.choice(sorted(CARRIES)),
        "fresh": rng.random() < 0.5,
        "autocast": rng.random() < 0.06 and is_used_once,
        "mean": rng.random() < 0.6,
        "keeps": rng.random() < 0.5,
        "packs": rng.random() < 0.05,
        "drawn": rng.random() < 0.15 and optimizer != "LBFGS",
        "region": rng.random() < 0.01 and is_used_once,
        "features": sorted(features),
    }


def train_text(model: dict[str, Any], loop: dict[str, Any]) -> str:
    """The function that trains."""
    closure = loop["optimizer"] == "LBFGS"
    made = "None" if loop["drawn"] else "torch.Generator().manual_seed(7)"
    lines = [f"generator = {made}", *_optimizer_lines(loop), *_at("setup", loop)]
    if model["cells"]:
        lines.append("state = None")
    body = []
    if closure:
        batches = ", ".join(f"batch({size}, generator)" for size in loop["micro_batches"])
        taken = [*_gradient_lines(model, loop), *_at("before_step", loop), "kept.update(loss=loss, x=x, out=out)"]
        body += [f"batches, kept = [{batches}], {{}}", "def closure():", *_indented([*taken, "return total"])]
        body += ["optimizer.step(closure)", 'loss, x, out = kept["loss"], kept["x"], kept["out"]']
    else:
        body += [*_gradient_lines(model, loop), *_at("before_step", loop)]
        body += ["scaler.step(optimizer)", "scaler.update()"] if loop["backward"] == "scaled" else ["optimizer.step()"]
        body += ["second_optimizer.step()"] if loop["split"] else []
    keeps = loop["keeps"] and not closure
    read = 'record("losses", [loss.item() for loss in losses])' if keeps else 'record("loss", loss.item())'
    body += [*_at("after_step", loop), read]
    steps = [f"for step in range({loop['steps']}):", *_indented(body)]
    if loop["region"]:
        steps = ['with torch.autocast("cpu", torch.bfloat16):', *_indented(steps)]
    lines += [*steps, *_at("end", loop), 'record("around", [CALLS.get(), len(COUNTS), SETTINGS["gain"]])']
    return "\n".join(["def train(model, record):", *_indented(lines)])


def _optimizer_lines(loop: dict[str, Any]) -> list[str]:
    made = OPTIMIZERS[loop["optimizer"]]
    if loop["split"]:
        lines = ["params = list(model.parameters())", f"optimizer = {made.format('params[::2]')}"]
        lines += [f"second_optimizer = {made.format('params[1::2]')}"]
    else:
        lines = [f"optimizer = {made.format('model.parameters()')}"]
    if loop["backward"] == "scaled":
        lines.append('scaler = torch.amp.GradScaler("cpu", enabled=False)')
    return lines


def _gradient_lines(model: dict[str, Any], loop: dict[str, Any]) -> list[str]:
    """From zero_grad() to the last backward of a step."""
    closure, number = loop["optimizer"] == "LBFGS", len(loop["micro_batches"])
    lines = ["optimizer.zero_grad()", *(["second_optimizer.zero_grad()"] if loop["split"] else [])]
    lines += _at("step_start", loop)
    if model["cells"] and (loop["fresh"] or closure):
        lines.append("state = None")
    lines += ["losses = []"] if loop["keeps"] and not closure else []
    late = loop["backward"] == "late"
    lines += ["total = 0.0"] if late or closure else []
    body = [] if closure else ["x, y = batch(size, generator)"]
    body += _at("micro_start", loop) + _forward_lines(model, loop)
    body += [f"loss = loss / {number}"] if number > 1 and loop["mean"] else []
    body += [*_at("loss", loop), *BACKWARDS[loop["backward"]]]
    body += ["total = total + loss.detach()"] if closure and not late else []
    body += ([] if late else _carry_lines(model, loop)) + _at("micro_end", loop)
    body += ["losses.append(loss)"] if loop["keeps"] and not closure else []
    if closure:
        lines += ["for x, y in batches:", *_indented(body), *(["total.backward()"] if late else [])]
    else:
        sizes = ", ".join(map(str, loop["micro_batches"]))
        lines += [f"for size in ({sizes},):", *_indented(body), *(["total.backward()"] if late else [])]
    return lines + (_carry_lines(model, loop) if late else [])


def _forward_lines(model: dict[str, Any], loop: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    if model["cells"]:
        lines += ["if state is None:", "    state = fresh_state(len(x))", "result, state = model(x, state)"]
    else:
        lines += ["result = model(x)"]
    lines += {
        "tensor": ["out = hidden = result"],
        "pair": ["out, hidden = result"],
        "dict": ['out, hidden = result["out"], result["hidden"]'],
    }[model["result"]]
    lines += _at("output", loop)
    flat = "out.flatten(0, 1)"
    lines += {
        "mse": ["loss = F.mse_loss(out, F.one_hot(y, V).to(out.dtype))"],
        "cross entropy": [f"loss = F.cross_entropy({flat}, y.flatten())"],
        "some targets": [f"loss = F.cross_entropy({flat}, y.flatten(), ignore_index=0)"],
    }[loop["loss"]]
    if loop["packs"]:
        hooks = "torch.autograd.graph.saved_tensors_hooks(rounded, lambda item: item)"
        lines = [f"with {hooks}:", *_indented(lines)]
    if loop["autocast"]:
        return ['with torch.autocast("cpu", torch.bfloat16):', *_indented(lines)]
    return lines


def _carry_lines(model: dict[str, Any], loop: dict[str, Any]) -> list[str]:
    if not model["cells"]:
        return []
    if loop["carry"] == "detach_":
        items = "state.values()" if model["state"] == "dict" else "state"
        return [f"for item in {items}:", "    item.detach_()"]
    cut = "item.data" if loop["carry"] == "data" else "item.detach()"
    made = {
        "tuple": f"tuple({cut} for item in state)",
        "list": f"[{cut} for item in state]",
        "dict": f"{{key: {cut} for key, item in state.items()}}",
    }[model["state"]]
    return [f"state = {made}"]


def helpers_text(model: dict[str, Any]) -> str:
    """What the loop calls: batches, a call that gives one tensor, a first parameter, the last module."""
    x = "torch.randint(V, (size, T), generator=generator)"
    if model["input"] == "floats":
        x = "torch.randn(size, T, W, generator=generator).to(DTYPE)"
    lines = [
        "def batch(size, generator):",
        "    def read():",
        f"        x = {x}",
        "        return x, torch.randint(V, (size, T), generator=generator)",
        "",
        "    return GIVEN(read)",
        "",
        "",
        "def first(model):",
        "    return next(p for p in model.parameters() if p.is_floating_point())",
        "",
        "",
        "def last(model):",
        '    return getattr(model, "head", model.embed)',
        "",
        "",
        "def call(model, x):",
        "    result = model(x, fresh_state(len(x)))[0]" if model["cells"] else "    result = model(x)",
        "    return result" + {"tensor": "", "pair": "[0]", "dict": '["out"]'}[model["result"]],
    ]
    if model["cells"]:
        parts = f"[torch.zeros(size, W, dtype=DTYPE) for _ in range({state_size(model)})]"
        made = {"tuple": f"tuple({parts})", "list": parts, "dict": f"dict(zip('0123', {parts}))"}[model["state"]]
        lines += ["", "", "def fresh_state(size):", f"    return {made}"]
    return "\n".join(lines)


def _at(place: str, loop: dict[str, Any]) -> list[str]:
    return [line for name in loop["features"] for line in FEATURES[name].get(place, [])]


def _indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]
