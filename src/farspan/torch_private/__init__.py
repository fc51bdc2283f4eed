"""The only folder that uses torch names which are private or may move: a new torch release is an edit here."""

from torch._C import DisableTorchFunction as DisableTorchFunction
from torch._C import DisableTorchFunctionSubclass as DisableTorchFunctionSubclass
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves

from farspan.torch_private.autocast import autocast_region as autocast_region
from farspan.torch_private.autocast import forget_casts as forget_casts
from farspan.torch_private.autocast import in_autocast_region as in_autocast_region
from farspan.torch_private.autocast import is_any_autocast_enabled as is_any_autocast_enabled
from farspan.torch_private.autocast import watch_autocast_regions as watch_autocast_regions
from farspan.torch_private.autograd import goes_through_python as goes_through_python
from farspan.torch_private.autograd import history_of as history_of
from farspan.torch_private.autograd import hooks_on_saved as hooks_on_saved
from farspan.torch_private.autograd import is_run_again_inside as is_run_again_inside
from farspan.torch_private.autograd import leads_to as leads_to
from farspan.torch_private.autograd import leaves_behind as leaves_behind
from farspan.torch_private.autograd import leaves_with_gradient as leaves_with_gradient
from farspan.torch_private.autograd import modules_held_by as modules_held_by
from farspan.torch_private.autograd import saved_by as saved_by
from farspan.torch_private.autograd import shape_at as shape_at
from farspan.torch_private.autograd import with_history as with_history
from farspan.torch_private.calls import NAMES_A_STRETCH as NAMES_A_STRETCH
from farspan.torch_private.calls import call_inside_step_hooks as call_inside_step_hooks
from farspan.torch_private.calls import call_without_compiling as call_without_compiling
from farspan.torch_private.calls import check_release as check_release
from farspan.torch_private.calls import compile_what_it_calls as compile_what_it_calls
from farspan.torch_private.calls import compiling_nothing as compiling_nothing
from farspan.torch_private.calls import forget_inside_step_hooks as forget_inside_step_hooks
from farspan.torch_private.calls import has_step_hooks as has_step_hooks
from farspan.torch_private.calls import is_caching_parametrizations as is_caching_parametrizations
from farspan.torch_private.calls import is_compiled as is_compiled
from farspan.torch_private.calls import is_hook_of_all_modules as is_hook_of_all_modules
from farspan.torch_private.calls import load_between_hooks as load_between_hooks
from farspan.torch_private.calls import not_passed_on as not_passed_on
from farspan.torch_private.calls import parse_to as parse_to
from farspan.torch_private.calls import put_module_apply as put_module_apply
from farspan.torch_private.calls import recompute_through as recompute_through
from farspan.torch_private.calls import replace_apply as replace_apply
from farspan.torch_private.calls import watch_backward_hooks as watch_backward_hooks
from farspan.torch_private.fakes import as_it_is as as_it_is
from farspan.torch_private.fakes import become_parameter as become_parameter
from farspan.torch_private.fakes import decomposed as decomposed
from farspan.torch_private.fakes import fake_mode as fake_mode
from farspan.torch_private.fakes import fake_tensor as fake_tensor
from farspan.torch_private.fakes import flops_of as flops_of
from farspan.torch_private.fakes import is_fake as is_fake
from farspan.torch_private.fakes import is_fake_limit as is_fake_limit
from farspan.torch_private.fakes import is_not_torchs_device as is_not_torchs_device
from farspan.torch_private.fakes import lacks_data as lacks_data
from farspan.torch_private.fakes import on_fakes as on_fakes
from farspan.torch_private.fakes import silent_fakes as silent_fakes
from farspan.torch_private.fakes import tensors_in as tensors_in
from farspan.torch_private.fakes import watch_fakes as watch_fakes
from farspan.torch_private.fakes import with_sizes_kept as with_sizes_kept
from farspan.torch_private.files.dcp import dcp_classes as dcp_classes
from farspan.torch_private.files.loaders import forget_workers as forget_workers
from farspan.torch_private.files.serialization import address_of_storage as address_of_storage
from farspan.torch_private.files.serialization import watch_saving as watch_saving
from farspan.torch_private.flags import are_all_modules_hooked as are_all_modules_hooked
from farspan.torch_private.flags import call_container as call_container
from farspan.torch_private.flags import forward_hook_flags as forward_hook_flags
from farspan.torch_private.flags import forward_hooks_of_all as forward_hooks_of_all
from farspan.torch_private.flags import has_full_backward_hooks as has_full_backward_hooks
from farspan.torch_private.flags import is_compiled_wrapper as is_compiled_wrapper
from farspan.torch_private.mode_stack import disabled_torch_function as disabled_torch_function
from farspan.torch_private.mode_stack import is_mode_active as is_mode_active
from farspan.torch_private.mode_stack import no_dispatch as no_dispatch
from farspan.torch_private.mode_stack import put_modes as put_modes
from farspan.torch_private.mode_stack import run_without_modes_of as run_without_modes_of
from farspan.torch_private.mode_stack import take_modes_of as take_modes_of
from farspan.torch_private.mode_stack import without_any_mode as without_any_mode
from farspan.torch_private.mode_stack import without_modes_of as without_modes_of
from farspan.torch_private.mode_stack import without_overrides as without_overrides
from farspan.torch_private.operations.data_access import NEW_PARAMETER as NEW_PARAMETER
from farspan.torch_private.operations.data_access import PAST_OPERATIONS as PAST_OPERATIONS
from farspan.torch_private.operations.data_access import WITHOUT_DATA as WITHOUT_DATA
from farspan.torch_private.operations.data_access import chooses_by_modes as chooses_by_modes
from farspan.torch_private.operations.data_access import show_hidden as show_hidden
from farspan.torch_private.operations.data_access import show_ways_into_func as show_ways_into_func
from farspan.torch_private.operations.forms import Form as Form
from farspan.torch_private.operations.forms import PlainMode as PlainMode
from farspan.torch_private.operations.forms import form_of as form_of
from farspan.torch_private.operations.forms import has_own_dispatch as has_own_dispatch
from farspan.torch_private.operations.forms import has_storage as has_storage
from farspan.torch_private.operations.forms import key_of_storage as key_of_storage
from farspan.torch_private.operations.forms import num_users_of as num_users_of
from farspan.torch_private.operations.forms import tensor_on as tensor_on
from farspan.torch_private.operations.settings import Settings as Settings
from farspan.torch_private.operations.settings import alone as alone
from farspan.torch_private.operations.settings import settings_now as settings_now
from farspan.torch_private.symbols import SYMBOLS as SYMBOLS
from farspan.torch_private.symbols import Symbols as Symbols
from farspan.torch_private.symbols import hint_of as hint_of
from farspan.torch_private.symbols import product as product
from farspan.torch_private.symbols import quotient as quotient
from farspan.torch_private.symbols import units_of as units_of
from farspan.torch_private.symbols import without_assumptions as without_assumptions
from farspan.torch_private.tensors import ADAPTIVE_RESULT as ADAPTIVE_RESULT
from farspan.torch_private.tensors import as_activation as as_activation
from farspan.torch_private.tensors import copy_all as copy_all
from farspan.torch_private.tensors import fill_with_poison as fill_with_poison
from farspan.torch_private.tensors import has_compatible_type as has_compatible_type
from farspan.torch_private.tensors import has_gradient_hooks as has_gradient_hooks
from farspan.torch_private.tensors import has_memory_of_its_own as has_memory_of_its_own
from farspan.torch_private.tensors import has_other_users as has_other_users
from farspan.torch_private.tensors import has_weak_references as has_weak_references
from farspan.torch_private.tensors import hooks_on as hooks_on
from farspan.torch_private.tensors import innermost as innermost
from farspan.torch_private.tensors import is_memory_of_others as is_memory_of_others
from farspan.torch_private.tensors import is_same_generator as is_same_generator
from farspan.torch_private.tensors import is_used_below as is_used_below
from farspan.torch_private.tensors import is_wrapped as is_wrapped
from farspan.torch_private.tensors import make_wrapper as make_wrapper
from farspan.torch_private.tensors import make_wrapper_subclass as make_wrapper_subclass
from farspan.torch_private.tensors import move_data as move_data
from farspan.torch_private.tensors import num_users_of_storage as num_users_of_storage
from farspan.torch_private.tensors import poisoned as poisoned
from farspan.torch_private.tensors import raw_grad as raw_grad
from farspan.torch_private.tensors import raw_grad_fn as raw_grad_fn
from farspan.torch_private.tensors import set_raw_grad as set_raw_grad
from farspan.torch_private.tensors import set_version as set_version
from farspan.torch_private.tensors import shares_only_with_its_base as shares_only_with_its_base
from farspan.torch_private.tensors import storage_at as storage_at
from farspan.torch_private.tensors import swap_referenced as swap_referenced
from farspan.torch_private.tensors import tensor_of_class as tensor_of_class
from farspan.torch_private.tensors import unscale_ as unscale_
from farspan.torch_private.tensors import update_scale_ as update_scale_

__all__ = [
    "as_activation",
    "ADAPTIVE_RESULT",
    "address_of_storage",
    "alone",
    "dcp_classes",
    "watch_saving",
    "are_all_modules_hooked",
    "as_it_is",
    "DisableTorchFunction",
    "DisableTorchFunctionSubclass",
    "DynamicOutputShapeException",
    "FakeTensorMode",
    "Form",
    "NEW_PARAMETER",
    "PAST_OPERATIONS",
    "PlainMode",
    "SYMBOLS",
    "WITHOUT_DATA",
    "Settings",
    "Symbols",
    "TorchDispatchMode",
    "autocast_region",
    "copy_all",
    "call_container",
    "call_without_compiling",
    "check_release",
    "chooses_by_modes",
    "compile_what_it_calls",
    "compiling_nothing",
    "become_parameter",
    "decomposed",
    "disabled_torch_function",
    "fake_mode",
    "fake_tensor",
    "flops_of",
    "form_of",
    "forget_casts",
    "forget_workers",
    "has_compatible_type",
    "has_full_backward_hooks",
    "has_gradient_hooks",
    "fill_with_poison",
    "hooks_on",
    "has_memory_of_its_own",
    "is_memory_of_others",
    "move_data",
    "has_other_users",
    "has_own_dispatch",
    "has_weak_references",
    "hint_of",
    "innermost",
    "is_used_below",
    "hooks_on_saved",
    "in_autocast_region",
    "is_any_autocast_enabled",
    "is_caching_parametrizations",
    "is_compiled",
    "is_compiled_wrapper",
    "is_same_generator",
    "is_fake",
    "is_fake_limit",
    "is_hook_of_all_modules",
    "is_mode_active",
    "is_not_torchs_device",
    "is_wrapped",
    "is_run_again_inside",
    "has_storage",
    "key_of_storage",
    "lacks_data",
    "leaves_behind",
    "leads_to",
    "leaves_with_gradient",
    "make_wrapper",
    "modules_held_by",
    "no_dispatch",
    "not_passed_on",
    "parse_to",
    "replace_apply",
    "num_users_of",
    "num_users_of_storage",
    "on_fakes",
    "product",
    "put_modes",
    "quotient",
    "put_module_apply",
    "poisoned",
    "raw_grad",
    "raw_grad_fn",
    "recompute_through",
    "saved_by",
    "run_without_modes_of",
    "set_raw_grad",
    "settings_now",
    "set_version",
    "shares_only_with_its_base",
    "goes_through_python",
    "history_of",
    "shape_at",
    "show_hidden",
    "show_ways_into_func",
    "with_history",
    "storage_at",
    "silent_fakes",
    "take_modes_of",
    "tensor_of_class",
    "tensor_on",
    "tensors_in",
    "tree_leaves",
    "units_of",
    "unscale_",
    "update_scale_",
    "watch_autocast_regions",
    "watch_backward_hooks",
    "watch_fakes",
    "with_sizes_kept",
    "without_any_mode",
    "without_assumptions",
    "without_modes_of",
    "without_overrides",
]
