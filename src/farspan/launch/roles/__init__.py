"""Several programs in one run, each with processes of its own: `farspan run --role actor=4 --role learner=2 train.py`.

`run_roles` starts them and is imported for that alone, as no process needs it.
"""

from farspan.launch.roles.role import Role as Role
from farspan.launch.roles.role import describe_process as describe_process
from farspan.launch.roles.role import read_role as read_role
from farspan.launch.roles.role import role as role

__all__ = ["Role", "describe_process", "read_role", "role"]
