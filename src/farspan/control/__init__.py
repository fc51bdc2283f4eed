"""The side channel: a small control plane between the ranks, next to the data transport. Imports no torch.

It carries no tensors: it compares the ranks' programs, gathers small values, passes on questions, and spreads failures,
so that a difference or a death is an error with a name and never a hang.

    rank 1 ---+
              +--- hub (a thread in rank 0's process)        a star of TCP connections; rank 0 is a client too
    rank 2 ---+     |                                        (past 33 ranks a tree, in which some ranks relay)
                  rank 0

`wire` frames bytes; `hub` decides (its state is pure, without sockets) and moves its messages; `tree` is how many ranks
become a few connections; `channel` is what a rank holds, `link` its connection, `requests` its questions and answers,
`gathers` its parts of all-gathers, `waits` what it waits for, `workers` the threads that answer."""

__all__: list[str] = []
