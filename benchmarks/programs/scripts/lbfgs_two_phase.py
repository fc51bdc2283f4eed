"""A fit in two phases, as in many physics scripts: Adam first, then LBFGS with a strong Wolfe line search."""

import numpy as np
import torch
from torch import nn

torch.manual_seed(1234)
np.random.seed(1234)


class DNN(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.linears = nn.ModuleList([nn.Linear(a, b) for a, b in zip(layers[:-1], layers[1:])])
        for linear in self.linears:
            nn.init.xavier_normal_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(self, x):
        for linear in self.linears[:-1]:
            x = torch.tanh(linear(x))
        return self.linears[-1](x)


lb, ub = np.array([-1.0, 0.0]), np.array([1.0, 1.0])
points = lb + (ub - lb) * np.random.rand(60, 2)
exact = np.exp(-points[:, 1:]) * np.sin(np.pi * points[:, :1])
X = torch.tensor(points, dtype=torch.float32)
u = torch.tensor(exact, dtype=torch.float32)
model = DNN([2, 16, 16, 16, 1])
# farspan: model = farspan.distribute(model)
adam = torch.optim.Adam(model.parameters(), lr=5e-3)
for it in range(20):
    loss = ((model(X) - u) ** 2).mean()
    adam.zero_grad()
    loss.backward()
    adam.step()
    if it % 5 == 0:
        print("Adam  It: %d, Loss: %.5e" % (it, loss.item()))

iteration = 0
optimizer = torch.optim.LBFGS(
    model.parameters(),
    lr=1.0,
    max_iter=12,
    max_eval=20,
    history_size=8,
    tolerance_change=1e-12,
    line_search_fn="strong_wolfe",
)


def loss_func():
    global iteration
    optimizer.zero_grad()
    loss = ((model(X) - u) ** 2).mean()
    loss.backward()
    iteration += 1
    if iteration % 4 == 0:
        print("LBFGS It: %d, Loss: %.5e" % (iteration, loss.item()))
    return loss


optimizer.step(loss_func)
with torch.no_grad():
    error = np.linalg.norm(exact - model(X).numpy(), 2) / np.linalg.norm(exact, 2)
print("Error u: %.6e after %d evaluations" % (error, iteration))
np.savetxt("prediction.txt", model(X).detach().numpy())
torch.save(model.state_dict(), "dnn.pt")
