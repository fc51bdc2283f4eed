"""A model that torch.fx has traced and rewritten before training: activations swapped, BatchNorm folded afterwards, nodes printed, GraphModule saved."""

import torch
import torch.fx as fx
import torch.nn as nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        h = torch.relu(self.bn1(self.conv1(x)))
        h = h + torch.relu(self.bn2(self.conv2(h))) * self.scale
        return self.fc(h.mean((2, 3)))


torch.manual_seed(0)
traced = fx.symbolic_trace(Net())
for node in traced.graph.nodes:
    if node.op == "call_function" and node.target is torch.relu:
        with traced.graph.inserting_after(node):
            new = traced.graph.call_function(nn.functional.gelu, node.args)
            node.replace_all_uses_with(new)
        traced.graph.erase_node(node)
traced.recompile()
model = traced
# farspan: model = farspan.distribute(model)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(9, 1, 5, 5), torch.arange(9) % 3
for i in range(5):
    loss = nn.functional.cross_entropy(model(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(i, loss.item(), model.bn1.running_mean.sum().item())
print(len(model.graph.nodes), [n.name for n in model.graph.nodes][:4])
model.eval()
with torch.no_grad():
    a = model(x)
    for c, b in ((model.conv1, model.bn1), (model.conv2, model.bn2)):
        w = b.weight / torch.sqrt(b.running_var + b.eps)
        c.bias.copy_((c.bias - b.running_mean) * w + b.bias)
        c.weight.mul_(w.view(-1, 1, 1, 1))
        b.running_mean.zero_()
        b.running_var.fill_(1.0 - b.eps)
        b.weight.fill_(1.0)
        b.bias.zero_()
    print((model(x) - a).abs().max().item() < 1e-5)
torch.save(model.state_dict(), "folded.pt")
