"""A word-level language model: an LSTM whose hidden state is carried over, and SGD written by hand."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parts.log import Log
from parts.text import words

BATCH_SIZE, EVAL_BATCH_SIZE, BPTT, EPOCHS, CLIP, LOG_INTERVAL = 8, 4, 12, 3, 0.25, 4
DROPOUT = 0.0  # the masks of a distributed model are its own: see docs/limits.md


class RNNModel(nn.Module):
    """An encoder, a recurrent module, and a decoder that shares the encoder's weights."""

    def __init__(self, num_tokens: int, num_inputs: int, num_hidden: int, num_layers: int) -> None:
        super().__init__()
        self.num_hidden, self.num_layers, self.num_tokens = num_hidden, num_layers, num_tokens
        self.drop = nn.Dropout(DROPOUT)
        self.encoder = nn.Embedding(num_tokens, num_inputs)
        self.rnn = nn.LSTM(num_inputs, num_hidden, num_layers, dropout=DROPOUT)
        self.decoder = nn.Linear(num_hidden, num_tokens)
        self.decoder.weight = self.encoder.weight
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, source: Tensor, hidden: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        embedded = self.drop(self.encoder(source))
        output, hidden = self.rnn(embedded, hidden)
        decoded = self.decoder(self.drop(output)).view(-1, self.num_tokens)
        return F.log_softmax(decoded, dim=1), hidden

    def init_hidden(self, batch_size: int) -> tuple[Tensor, Tensor]:
        weight = next(self.parameters())
        shape = (self.num_layers, batch_size, self.num_hidden)
        return weight.new_zeros(shape), weight.new_zeros(shape)


def repackage_hidden(hidden):
    """Wraps hidden states in new tensors, to detach them from their history."""
    if isinstance(hidden, Tensor):
        return hidden.detach()
    return tuple(repackage_hidden(part) for part in hidden)


def batchify(data: Tensor, batch_size: int) -> Tensor:
    num_rows = data.size(0) // batch_size
    return data.narrow(0, 0, num_rows * batch_size).view(batch_size, -1).t().contiguous()


def get_batch(source: Tensor, i: int) -> tuple[Tensor, Tensor]:
    length = min(BPTT, len(source) - 1 - i)
    return source[i : i + length], source[i + 1 : i + 1 + length].view(-1)


torch.manual_seed(1111)
text, num_tokens = words(200)
train_data = batchify(text[:1600], BATCH_SIZE)
val_data = batchify(text[1600:2000], EVAL_BATCH_SIZE)
model = RNNModel(num_tokens, 32, 32, 2)
# farspan: model = farspan.distribute(model)
criterion = nn.NLLLoss()


def evaluate(source: Tensor) -> float:
    model.eval()
    total = 0.0
    hidden = model.init_hidden(EVAL_BATCH_SIZE)
    with torch.no_grad():
        for i in range(0, source.size(0) - 1, BPTT):
            data, targets = get_batch(source, i)
            output, hidden = model(data, hidden)
            hidden = repackage_hidden(hidden)
            total += len(data) * criterion(output, targets).item()
    return total / (len(source) - 1)


def train(epoch: int, lr: float) -> None:
    model.train()
    total = 0.0
    hidden = model.init_hidden(BATCH_SIZE)
    for batch, i in enumerate(range(0, train_data.size(0) - 1, BPTT)):
        data, targets = get_batch(train_data, i)
        model.zero_grad()
        hidden = repackage_hidden(hidden)
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for p in model.parameters():
            assert p.grad is not None
            p.data.add_(p.grad, alpha=-lr)
        total += loss.item()
        if batch % LOG_INTERVAL == 0 and batch > 0:
            log.show(f"epoch {epoch} batch {batch}", loss=total / LOG_INTERVAL, ppl=math.exp(total / LOG_INTERVAL))
            total = 0.0


log = Log()
lr, best_loss, best_state = 20.0, None, None
for epoch in range(1, EPOCHS + 1):
    train(epoch, lr)
    val_loss = evaluate(val_data)
    log.show(f"end of epoch {epoch}", valid=val_loss)
    if best_loss is None or val_loss < best_loss:
        best_loss, best_state = val_loss, copy.deepcopy(model.state_dict())
    else:
        lr /= 4.0
assert best_state is not None
model.load_state_dict(best_state)
log.show("end", valid=evaluate(val_data))
log.finish(model)
