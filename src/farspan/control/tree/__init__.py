"""The tree over which ranks speak: who is connected to whom, and how what they say is put together on its way up.

`numbers` is the tree; `relay` decides what a rank that has children passes on, without sockets; `rounds` are the steps
that ranks have begun, `blocks` the parts of a gather; `speakers` says for whom a connection may speak."""

__all__: list[str] = []
