"""The tree over which ranks speak: who is connected to whom, and how what they say is put together on its way up."""
