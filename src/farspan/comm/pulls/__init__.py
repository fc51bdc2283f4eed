"""Tensors that one rank asks another for, at any time: over a TCP connection of these two, not by way of the hub.

    reader                                        owner
      where are your tensors?     -- control -->  listens, once                   (`Pulls.listen`)
      connects, both prove that they belong to the run (`control.hub.joining`)
      {"pull": request}           ------------->  handler(request), in a thread of this connection
                                  <-------------  {"body", "num_tensors"}, or {"error"}
                                  <-------------  {"dtype", "shape"} + bytes, for each tensor

The program of the owner need not do anything: it may compute, wait for others, or have left its last line. A connection
is for one question at a time, so nothing overtakes anything; who gives up closes it."""

__all__: list[str] = []
