"""Two LSTM cells that learn to go on with sine waves, in double precision, by LBFGS and its closure."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from parts.log import Log

NUM_WAVES, LENGTH, HIDDEN, STEPS, FUTURE = 8, 20, 16, 3, 10


class Sequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm1 = nn.LSTMCell(1, HIDDEN)
        self.lstm2 = nn.LSTMCell(HIDDEN, HIDDEN)
        self.linear = nn.Linear(HIDDEN, 1)

    def forward(self, input: Tensor, future: int = 0) -> Tensor:
        outputs = []
        h_t = torch.zeros(input.size(0), HIDDEN, dtype=torch.double)
        c_t = torch.zeros(input.size(0), HIDDEN, dtype=torch.double)
        h_t2 = torch.zeros(input.size(0), HIDDEN, dtype=torch.double)
        c_t2 = torch.zeros(input.size(0), HIDDEN, dtype=torch.double)
        output = torch.zeros(input.size(0), 1, dtype=torch.double)
        for input_t in input.split(1, dim=1):
            h_t, c_t = self.lstm1(input_t, (h_t, c_t))
            h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
            output = self.linear(h_t2)
            outputs += [output]
        for _ in range(future):
            h_t, c_t = self.lstm1(output, (h_t, c_t))
            h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
            output = self.linear(h_t2)
            outputs += [output]
        return torch.cat(outputs, dim=1)


torch.manual_seed(0)
starts = torch.randint(-80, 80, (NUM_WAVES, 1))
data = torch.sin((torch.arange(LENGTH).unsqueeze(0) + starts).double() / 5)
input, target = data[3:, :-1], data[3:, 1:]
test_input, test_target = data[:3, :-1], data[:3, 1:]
seq = Sequence()
seq.double()
# farspan: seq = farspan.distribute(seq)
criterion = nn.MSELoss()
optimizer = torch.optim.LBFGS(seq.parameters(), lr=0.8, max_iter=5)

log = Log()
for i in range(STEPS):

    def closure() -> Tensor:
        optimizer.zero_grad()
        out = seq(input)
        loss = criterion(out, target)
        log.show("evaluation", loss=loss.item())
        loss.backward()
        return loss

    optimizer.step(closure)  # pyright: ignore[reportArgumentType]
    with torch.no_grad():
        pred = seq(test_input, future=FUTURE)
        loss = criterion(pred[:, :-FUTURE], test_target)
        y = pred.detach().numpy()
        log.show(f"step {i}", test=loss.item(), last=float(y[0, -1]))
log.finish(seq)
