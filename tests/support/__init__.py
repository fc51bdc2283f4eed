"""What tests share: ranks as threads or processes, models, and the plain loop they are compared with."""
