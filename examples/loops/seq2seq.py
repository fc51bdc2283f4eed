"""Sequence to sequence with attention: an encoder, a decoder, two optimizers, and a coin for teacher forcing."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parts.log import Log

SOS, EOS, NUM_TOKENS, HIDDEN, MAX_LENGTH = 0, 1, 12, 24, 7
ITERATIONS, PRINT_EVERY, TEACHER_FORCING_RATIO = 30, 5, 0.5


class EncoderRNN(nn.Module):
    def __init__(self, num_tokens: int, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.embedding = nn.Embedding(num_tokens, hidden_size)
        self.gru = nn.GRU(hidden_size, hidden_size)

    def forward(self, input: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        embedded = self.embedding(input).view(1, 1, -1)
        return self.gru(embedded, hidden)

    def init_hidden(self) -> Tensor:
        return torch.zeros(1, 1, self.hidden_size)


class AttnDecoderRNN(nn.Module):
    def __init__(self, hidden_size: int, num_tokens: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_tokens, hidden_size)
        self.attn = nn.Linear(hidden_size * 2, MAX_LENGTH)
        self.attn_combine = nn.Linear(hidden_size * 2, hidden_size)
        self.gru = nn.GRU(hidden_size, hidden_size)
        self.out = nn.Linear(hidden_size, num_tokens)

    def forward(self, input: Tensor, hidden: Tensor, encoder_outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        embedded = self.embedding(input).view(1, 1, -1)
        attn_weights = F.softmax(self.attn(torch.cat((embedded[0], hidden[0]), 1)), dim=1)
        attn_applied = torch.bmm(attn_weights.unsqueeze(0), encoder_outputs.unsqueeze(0))
        output = torch.cat((embedded[0], attn_applied[0]), 1)
        output = F.relu(self.attn_combine(output).unsqueeze(0))
        output, hidden = self.gru(output, hidden)
        return F.log_softmax(self.out(output[0]), dim=1), hidden, attn_weights


def random_pair() -> tuple[Tensor, Tensor]:
    """A sequence and itself in reverse, [length, 1] each, with an end."""
    tokens = [random.randrange(2, NUM_TOKENS) for _ in range(random.randint(2, MAX_LENGTH - 1))]
    return torch.tensor([*tokens, EOS]).view(-1, 1), torch.tensor([*tokens[::-1], EOS]).view(-1, 1)


def encode(input_tensor: Tensor) -> tuple[Tensor, Tensor]:
    encoder_hidden = encoder.init_hidden()
    encoder_outputs = torch.zeros(MAX_LENGTH, HIDDEN)
    for ei in range(input_tensor.size(0)):
        encoder_output, encoder_hidden = encoder(input_tensor[ei], encoder_hidden)
        encoder_outputs[ei] = encoder_output[0, 0]
    return encoder_outputs, encoder_hidden


def train(input_tensor: Tensor, target_tensor: Tensor) -> float:
    encoder_optimizer.zero_grad()
    decoder_optimizer.zero_grad()
    encoder_outputs, decoder_hidden = encode(input_tensor)
    decoder_input = torch.tensor([[SOS]])
    loss = torch.zeros(())
    if random.random() < TEACHER_FORCING_RATIO:
        for di in range(target_tensor.size(0)):
            decoder_output, decoder_hidden, _ = decoder(decoder_input, decoder_hidden, encoder_outputs)
            loss += criterion(decoder_output, target_tensor[di])
            decoder_input = target_tensor[di]
    else:
        for di in range(target_tensor.size(0)):
            decoder_output, decoder_hidden, _ = decoder(decoder_input, decoder_hidden, encoder_outputs)
            _, topi = decoder_output.topk(1)
            decoder_input = topi.squeeze().detach()
            loss += criterion(decoder_output, target_tensor[di])
            if decoder_input.item() == EOS:
                break
    loss.backward()
    encoder_optimizer.step()
    decoder_optimizer.step()
    return loss.item() / target_tensor.size(0)


@torch.no_grad()
def evaluate(input_tensor: Tensor) -> tuple[list[int], float]:
    """What the decoder says, and where it has looked most in the end."""
    encoder_outputs, decoder_hidden = encode(input_tensor)
    decoder_input = torch.tensor([[SOS]])
    decoded, attentions = [], torch.zeros(MAX_LENGTH, MAX_LENGTH)
    for di in range(MAX_LENGTH):
        decoder_output, decoder_hidden, attention = decoder(decoder_input, decoder_hidden, encoder_outputs)
        attentions[di] = attention.data
        _, topi = decoder_output.data.topk(1)
        decoded.append(int(topi.item()))
        if decoded[-1] == EOS:
            break
        decoder_input = topi.squeeze().detach()
    return decoded, attentions.max().item()


torch.manual_seed(5)
random.seed(5)
encoder = EncoderRNN(NUM_TOKENS, HIDDEN)
decoder = AttnDecoderRNN(HIDDEN, NUM_TOKENS)
# farspan: encoder, decoder = farspan.distribute(nn.ModuleList([encoder, decoder]))
encoder_optimizer = torch.optim.SGD(encoder.parameters(), lr=0.05)
decoder_optimizer = torch.optim.SGD(decoder.parameters(), lr=0.05)
criterion = nn.NLLLoss()
log = Log()
total = 0.0
for iteration in range(1, ITERATIONS + 1):
    total += train(*random_pair())
    if iteration % PRINT_EVERY == 0:
        log.show(f"{iteration} of {ITERATIONS}", loss=total / PRINT_EVERY)
        total = 0.0
words, attention = evaluate(random_pair()[0])
print(words)
log.show("attention", most=attention)
log.finish(encoder, decoder)
