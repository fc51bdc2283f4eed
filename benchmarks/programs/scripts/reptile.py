"""The shape of OpenAI's reptile demo: weights kept by deepcopy(state_dict), inner SGD by hand, weights interpolated."""

from copy import deepcopy

import numpy as np
import torch
from torch import nn

seed, innerstepsize, innerepochs, outerstepsize0, niterations, ntrain = 0, 0.02, 1, 0.1, 5, 5
rng = np.random.RandomState(seed)
torch.manual_seed(seed)
x_all = np.linspace(-5, 5, 20)[:, None]


def gen_task():
    phase = rng.uniform(low=0, high=2 * np.pi)
    ampl = rng.uniform(0.1, 5)
    return lambda x: np.sin(x + phase) * ampl


model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
# farspan: model = farspan.distribute(model)


def totorch(x):
    return torch.Tensor(x)


def train_on_batch(x, y):
    x, y = totorch(x), totorch(y)
    model.zero_grad()
    ypred = model(x)
    loss = (ypred - y).pow(2).mean()
    loss.backward()
    for param in model.parameters():
        param.data -= innerstepsize * param.grad.data


def predict(x):
    return model(totorch(x)).data.numpy()


for iteration in range(niterations):
    weights_before = deepcopy(model.state_dict())
    f = gen_task()
    y_all = f(x_all)
    for _ in range(innerepochs):
        inds = rng.permutation(len(x_all))
        for start in range(0, len(x_all), ntrain):
            mbinds = inds[start : start + ntrain]
            train_on_batch(x_all[mbinds], y_all[mbinds])
    weights_after = model.state_dict()
    outerstepsize = outerstepsize0 * (1 - iteration / niterations)
    model.load_state_dict(
        {
            name: weights_before[name] + (weights_after[name] - weights_before[name]) * outerstepsize
            for name in weights_before
        }
    )
    weights_before = deepcopy(model.state_dict())
    for _ in range(4):
        train_on_batch(x_all[:10], y_all[:10])
    lossval = np.square(predict(x_all) - y_all).mean()
    model.load_state_dict(weights_before)
    print(f"iteration {iteration + 1}  loss on plotted curve {lossval:.7f}")
np.save("curve.npy", predict(x_all))
torch.save(model.state_dict(), "reptile.pt")
