"""The shape of jacobgil/pytorch-grad-cam: activations and their gradients taken by hooks from a trained network."""

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


class ActivationsAndGradients:
    def __init__(self, model, target_layers):
        self.model = model
        self.gradients, self.activations, self.handles = [], [], []
        for layer in target_layers:
            self.handles.append(layer.register_forward_hook(self.save_activation))
            self.handles.append(layer.register_forward_hook(self.save_gradient))

    def save_activation(self, module, input, output):
        self.activations.append(output.cpu().detach())

    def save_gradient(self, module, input, output):
        if not hasattr(output, "requires_grad") or not output.requires_grad:
            return

        def _store_grad(grad):
            self.gradients = [grad.cpu().detach(), *self.gradients]

        output.register_hook(_store_grad)

    def __call__(self, x):
        self.gradients, self.activations = [], []
        return self.model(x)

    def release(self):
        for handle in self.handles:
            handle.remove()


def scale_cam(cam):
    cam = cam - np.min(cam)
    return cam / (1e-7 + np.max(cam))


torch.manual_seed(19)
x = torch.rand(60, 1, 10, 10) * 0.3
y = torch.randint(0, 2, (60,))
for n in range(60):
    row = 1 if y[n] == 0 else 6
    x[n, 0, row : row + 3, 3:6] += 1.0
model = nn.Sequential(
    nn.Conv2d(1, 6, 3, padding=1),
    nn.BatchNorm2d(6),
    nn.ReLU(),
    nn.Conv2d(6, 8, 3, padding=1),
    nn.BatchNorm2d(8),
    nn.ReLU(),
    nn.Dropout(0.1),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(200, 2),
)
# farspan: model = farspan.distribute(model)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for epoch in range(3):
    for i in torch.randperm(60).split(15):
        loss = F.cross_entropy(model(x[i]), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} loss {loss.item():.7f}")
model.eval()
wrapped = ActivationsAndGradients(model, [model[5]])
cams = []
for n in range(3):
    output = wrapped(x[n : n + 1])
    model.zero_grad()
    target = output[0, y[n]]
    target.backward(retain_graph=True)
    activations, grads = wrapped.activations[-1].numpy(), wrapped.gradients[-1].numpy()
    weights = np.mean(grads, axis=(2, 3))
    cam = np.maximum((weights[:, :, None, None] * activations).sum(axis=1), 0)[0]
    cams.append(scale_cam(cam))
    where = np.unravel_index(cams[-1].argmax(), cams[-1].shape)
    print(
        f"class {int(y[n])} score {target.item():.6f} brightest at {tuple(int(k) for k in where)} mean {cam.mean():.6e}"
    )
wrapped.release()
np.save("cams.npy", np.stack(cams))
torch.save(model.state_dict(), "model.pt")
