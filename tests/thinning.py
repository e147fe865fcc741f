"""Products of parameters of which `make test` runs a part, and `make test-slow` the rest.

Where axes do not touch one another in the code, a product of them repeats what its parts have shown. What is left out
is marked ``slow`` and nothing else, so that a run without ``-m`` has the product whole.
"""

import itertools
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest


def thinned(*axes: Iterable[Any], ids: Callable[[Any], str] | None = None) -> list[Any]:
    """Their product, kept where the place in the last axis is the sum of the other places.

    Of two axes every value is there, of three also every pair, as long as the last axis is not the longest.
    """
    numbered = [list(enumerate(axis)) for axis in axes]
    last = len(numbered[-1])
    found = []
    for chosen in itertools.product(*numbered):
        *others, own = (place for place, _ in chosen)
        found.append(_param([value for _, value in chosen], sum(others) % last == own, ids))
    return found


def mostly_slow(values: Iterable[Any], kept: Sequence[str], name: Callable[[Any], str] = str) -> list[Any]:
    """All of them by name; `make test` runs those that are ``kept``."""
    values = list(values)
    missing = set(kept) - {name(value) for value in values}
    assert not missing, f"no such value: {sorted(missing)}"
    return [_param([value], name(value) in kept, name) for value in values]


def _param(values: list[Any], kept: bool, ids: Callable[[Any], str] | None) -> Any:
    named = None if ids is None else "-".join(ids(value) for value in values)
    return pytest.param(*values, marks=() if kept else pytest.mark.slow, id=named)


KEPT = {
    "test_padding.py::test_training_is_the_same": r"^KFAC-words|SOAP-images",
    "test_padding.py::test_a_checkpoint_goes_from_one_to_the_other_and_back": r"^EKFAC.*plain, packed, plain",
    "test_padding.py::test_what_is_saved_has_no_padding": r"^(KFAC|EKFAC|SOAP)$",
    "test_defaults_train.py::test_clipping_makes_a_wide_range_of_rates_work": r"^KFAC",
    "test_robustness.py::test_long_runs_leave_no_objects_behind": r"KFAC sampled",
    "test_loop.py::test_every_optimizer_learns_and_repeats_itself": r"L-BFGS|adaptive|EKFAC|Muon",
    "test_networks.py::test_every_member_learns": r"^(soap|kfac)$",
    "test_samples.py::test_every_member_runs_and_is_reproducible": r"^(sgd|soap|kfac|ngd)$",
    "test_linear_experiments.py::test_smoke_runs_claims_and_draws": r"four-settings",
    "test_linear_experiments.py::test_claims_fail_on_wrong_values": r"wrong9-",
    "test_linalg_stochastic.py::test_standard_errors_are_calibrated": r"indefinite",
    "test_pac_bayes_experiment.py::test_a_cell_that_was_stopped_goes_on": r"^3$",
    "test_pac_bayes.py::test_a_stack_that_was_stopped_goes_on": r"^(1-1-1-adam|2-3-2-rmsprop)$",
    "test_conv_nets.py::test_all_trials_and_the_choice_are_recorded": r"^conv-nets$",
    "test_conv_nets.py::test_a_method_that_never_trains_is_a_record": r"^conv-nets$",
    "test_conv_nets.py::test_smoke_holds_what_it_claims": r"^conv-nets$",
    "test_stacked.py::test_together_is_as_alone": r"^kfac$",
    "test_single_index.py::test_means_over_trials_are_the_predicted_ones": r"^two$",
    "test_fast_accuracy.py::test_factors_of_a_training": r"-6-",
    "test_masks_contract.py::test_masked_positions_are_as_if_deleted_contract": r"exact-expand|empirical-reduce",
    "test_per_example_squares.py::test_the_same_as_layer_by_layer": r"True",
    "test_deferred_statistics.py::test_layers_without_a_gradient": r"5-",
    "test_pieces.py::test_missing_gradients": r"^(KFAC|Shampoo|Adam)$",
    "test_pieces.py::test_every_kind_of_parameter": r"^(KFAC by products|Shampoo|fallback sgd)$",
    "test_compiled.py::test_hooks_of_the_user_on_a_compiled_model_act_once": r"inputs",
    "test_compiled.py::test_statistics_at_some_steps_of_a_compiled_model": r"^KFAC$|EKFAC",
    "test_factor.py::test_steps_are_the_same": r"KFAC|SOAP",
    "test_packed_inverses.py::test_steps_and_what_is_saved_are_the_same": r"KFAC-True",
    "test_ngd_formulas.py::test_ngd": r"exact-conv|dense",
    "test_documents.py::test_python_blocks_run": r"^(?!feature_learning|experiments\.md|hessian_structure|lazy_or_lea"
    r"rning|learned_step_sizes)",
    "test_rotations.py::test_training_by_halves_is_the_same": r"EKFAC",
    "test_rotations.py::test_a_basis_has_the_fixed_scale_when_it_is_resumed": r"EKFAC",
    "test_compiled.py::test_a_model_compiled_after_the_optimizer_was_built": r"KFAC",
    "test_feature_learning_plain.py::test_every_algorithm_is_the_plain_loop": r"kfac$|amgd|adam|altminmin|shampoo",
    "test_captured_step.py::test_captured_steps_are_the_same": r"KFAC|SOAP|Shampoo",
    "test_single_index_theory.py::test_correlations_equal_simulation": r"^300-200",
    "test_fast_accuracy.py::test_random_factors": r"K-FAC-100\.|Shampoo-10000\.|½-100\.|EKFAC-1000000\.",
    "test_sua.py::test_kfac": r"exact-absolute-padding|equal-relative-one|trace-absolute-one",
    "test_sua.py::test_ekfac": r"batch-exact-relative-padding|running-trace-absolute-one",
    "test_sua.py::test_foof": r"absolute-one|relative-padding",
    "test_sua.py::test_a_saved_state_goes_on": r"^(EKFAC|KFAC)$",
    "test_sua.py::test_one_offset_is_kfc": r"^(EKFAC|KFAC)$",
    "test_solver.py::test_a_run_that_is_resumed_goes_on": r"newton-newton-SOAP|auto-newton-KFAC",
    "test_solver.py::test_bases_by_sweeps_of_products": r"EKFAC-options3|KFAC-options5|Shampoo-options0",
    "test_solver.py::test_a_factor_that_is_replaced_is_followed": r"1.0-10-False|1000000.0-1-True|1000000.0-10-False",
    "test_asynchronous_executor.py::test_transposed_convolutions": r"KFAC-options[01]|Shampoo-options[24]"
    r"|SOAP-options[05]",
    "test_other_rounding.py::test_steps_on_other_machines": r"True-(SOAP|EKFAC)-wide|False-(Sha|EKFAC run).*dead",
    "test_found_inf.py::test_a_steady_step_asks_the_device_for_nothing": r"^(EKFAC|SOAP|Muon)$",
    "test_found_inf.py::test_a_bad_first_step": r"^(Adam|KFAC sampled|EKFAC|NGD|SOAP)-2-",
    "test_statistics_semantics.py::test_the_graph_is_freed_by_the_step": r"^(EKFAC|KFAC sampled|LocoProp|NGD)$",
    "test_statistics_semantics.py::test_the_graph_of_a_forward_without_backward_is_freed_by_the_step": r"^(KFAC|FOOF)$",
    "test_feature_learning_plain.py::test_gaussian_inputs_and_low_anisotropy": r"kfac|amgd",
    "test_report_browser.py::test_no_page_is_wider_than_its_screen": r"odd-one",
    "test_report_browser.py::test_pages_load_without_a_word_and_ask_nobody": r"^index|sample-one",
    "test_report_browser.py::test_all_text_stands_out": r"sample-one",
    "test_defaults_train.py::test_defaults_train": r"^(KFAC|SOAP|Muon)-dense",
    "test_any_loop.py::test_hooks_go_with_the_optimizer": r"^KFAC-0|^EKFAC-2",
    "test_state.py::test_distributed_state_dicts_resume_bit_for_bit": r"False-(KFAC|Muon)$|True-(EKFAC|Shampoo)$",
    "test_update_scale.py::test_the_scale_of_the_loss_is_of_no_account": r"^KFAC-pixel|^Shampoo-mean",
    "test_storage_integrity.py::test_fields_that_hold_something_else": r"other|nan|None",
    "test_doctor_findings.py::test_a_loss_above_chance_is_severe_where_it_takes_long_to_undo": r"moderate",
    "test_resumed_runs.py::test_as_without_a_break": r"EKFAC",
}
"""Tests whose cases take long and exercise the same code: a pattern of the cases that `make test` runs. The others are
slow."""


LONG = (
    "test_without_cuda.py::test_formulas_of_a_member",
    "test_fast_accuracy.py::test_factors_of_a_training",
    "test_solver.py::test_bases_by_sweeps_of_products",
    "test_killed.py::test_many_kills",
    "test_killed.py::test_workers_die_with_a_killed_runner",
    "test_runner.py::test_processes_give_the_same_records",
    "test_terminal.py::test_bar_and_table",
    "test_sample_complexity.py::test_the_dip_near_as_many_samples_as_inputs_is_not_stepped_over",
    "test_feature_learning_simulate.py::test_dfw_feels_the_smallest_eigenvalue_of_the_head_and_kfac_does_not",
    "test_drawing.py::test_files_for_papers_and_the_same_bytes_again",
    "test_report_site.py::test_the_same_records_give_the_same_files",
    "test_report_site.py::test_names_of_figures_do_not_leave_the_folder",
    "test_report_site.py::test_figures_come_as_files_with_their_numbers",
    "test_report_site.py::test_links_of_a_site_with_files_lead_somewhere",
    "test_samples.py::test_search_finds_what_all_rates_would",
    "test_theory_exact.py::test_the_error_of_ekfac_is_not_above_that_of_kfac_contract",
    "test_known.py::test_a_weight_with_a_norm_of_its_own_does_not_end_the_process",
    "test_kernel_memory.py::test_a_tiled_kernel_stays_within_its_memory",
    "test_commands.py::test_sigterm_says_how_to_go_on_and_ends_the_workers",
    "test_estimates_contract.py::test_the_largest_eigenvalues_by_lanczos_contract",
    "test_fuzz.py::test_no_block_lets_examples_interact",
    "test_architectures_oracle.py::test_random_architectures_equal_the_oracle",
    "test_linear_experiments.py::test_every_claim_of_the_longer_presets_finds_its_values",
    "test_head_to_head.py::test_sweep_smoke_claims_and_draws",
    "test_head_to_head.py::test_normalisation_smoke_claims_and_draws",
    "test_terminal.py::test_a_narrow_terminal_keeps_the_numbers",
    "test_report_browser.py::test_dark_and_light_pages_differ_and_paper_is_always_white",
    "test_report_browser.py::test_tables_keep_their_headers_also_on_a_phone",
    "test_report_browser.py::test_a_curve_is_seen_on_light_and_on_dark",
    "test_report_browser.py::test_the_watch_for_requests_sees_them",
    "test_search.py::test_processes_share_the_work",
    "test_head_to_head.py::test_figure_2_is_a_contrast",
    "test_linear_experiments.py::test_a_seed_is_the_same_alone_and_beside_others",
    "test_linear_experiments.py::test_lower_bound_numbers_of_the_specification",
    "test_card_g3.py::test_training_separates_the_classes",
    "test_tangent_features.py::test_one_training_of_a_residual_network_serves_all_pairs",
    "test_tangent_alignment_experiments.py::test_rates_are_chosen_on_seeds_that_are_not_reported",
    "test_tangent_alignment_experiments.py::test_the_paper_preset_on_a_handful_of_images",
    "test_george2023.py::test_the_whole_grid_and_the_choice_are_recorded",
    "test_george2023.py::test_claims_of_larger_presets_read_what_is_recorded",
    "test_card_g3.py::test_the_table_and_the_figure",
    "test_convolutional.py::test_scales_stay_over_sixteen_blocks_without_batch_norm",
    "test_conv_nets.py::test_figures_have_all_points",
    "test_shards.py::test_jobs_at_one_time_and_the_command",
    "test_commands.py::test_bad_values_of_every_experiment_exit_2_and_leave_nothing",
    "test_shards.py::test_a_share_that_is_killed_and_started_again",
    "test_shared_gpus.py::test_every_worker_sees_one_gpu",
    "test_report_site.py::test_the_index_lists_every_experiment_with_its_claims",
    "test_report_browser.py::test_one_gets_from_the_index_to_a_page_and_back",
    "test_report_browser.py::test_a_curve_can_be_hidden",
    "test_report_browser.py::test_numbers_under_a_figure_unfold",
    "test_report_browser.py::test_values_are_read_by_the_keyboard_and_said",
    "test_report_browser.py::test_without_a_script_the_page_says_the_same",
    "test_report_browser.py::test_a_claim_is_reached_from_the_overview",
    "test_report_browser.py::test_on_paper_what_is_folded_is_printed_and_what_needs_a_hand_is_not",
    "test_report_browser.py::test_figures_are_seen",
    "test_bounds_and_flows.py::test_the_paper_preset_runs_small",
)
"""Tests of seconds that repeat in large what others try in small; smoke presets are also run by `make mutants`."""
LONG_FILES = (
    "test_fisher_quality.py",
    "test_networks_experiment.py",
    "test_single_index_experiments.py",
    "test_samples_experiment.py",
    "test_family_index.py",
)
"""Files whose tests all look at one long run."""
FILES = {
    "test_operations_contract.py": 6,
    "test_reductions_contract.py": 3,
    "test_oracles.py": 3,
    "test_statistics_semantics.py": 6,
    "test_convention.py": 4,
    "test_found_inf.py": 8,
    "test_robustness.py": 6,
    "test_known.py": 10,
    "test_storage_integrity.py": 8,
    "test_changed_models.py": 4,
    "test_ntk.py": 7,
    "test_own_arithmetic_of_kernels.py": 4,
    "test_matrix_oracle.py": 9,
    "test_kronecker_oracle.py": 7,
    "test_jacobian.py": 7,
    "test_update_scale.py": 6,
    "test_any_loop.py": 3,
    "test_state.py": 4,
    "test_models_that_change.py": 3,
    "test_odd_models.py": 5,
    "test_kfac_formulas.py": 3,
    "test_ekfac_formulas.py": 3,
    "test_kernel_examples.py": 3,
    "test_deferred_statistics.py": 3,
    "test_fast_accuracy.py": 3,
    "test_scalings.py": 3,
    "test_pieces.py": 3,
    "test_networks.py": 3,
    "test_precision.py": 3,
    "test_contracts.py": 3,
    "test_estimates_contract.py": 3,
    "test_processes.py": 6,
    "test_examples.py": 3,
    "test_own_arithmetic.py": 8,
    "test_shampoo_formulas.py": 3,
    "test_foof_formulas.py": 3,
    "test_padding.py": 3,
    "test_assemble.py": 3,
    "test_other_rounding.py": 3,
    "test_tangent_alignment.py": 3,
    "test_doctor_findings.py": 2,
}
"""Files that try every property on every model or member: one case of so many of each test, others for each test."""
MANY, ONE_OF = 3, 6
"""In other files a test of so many cases or more runs one of so many."""
WHOLE = (
    "test_fuzz.py",
    "test_doctests.py",
    "test_documents.py",
    "test_bad_input.py",
    "test_coverage_contract.py",
    "test_errata.py",
    "test_sharded.py",
    "test_sharded_checks.py",
)
"""Files whose cases are not of one kind: their tests run whole."""


def left_out(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """The cases that `make test` does without."""
    by_test: dict[str, list[pytest.Item]] = {}
    for item in items:
        if not any(item.iter_markers("slow")) and not any(item.iter_markers("gpu")):
            test = f"{item.path.name}::{getattr(item, 'originalname', item.name)}"
            by_test.setdefault(test, []).append(item)
    for test, cases in by_test.items():
        if test in LONG or test.partition("::")[0] in LONG_FILES:
            yield from cases
        elif test in KEPT:
            yield from (case for case in cases if not re.search(KEPT[test], _id(case)))
        else:
            kept = -(-len(cases) // _one_of(test.partition("::")[0], len(cases)))
            yield from sorted(cases, key=lambda case: zlib.crc32(f"{test}[{_id(case)}]".encode()))[kept:]


def _one_of(file: str, cases: int) -> int:
    """Of how many cases one is run."""
    if file in WHOLE:
        return 1
    return FILES.get(file, ONE_OF if cases >= MANY else 1)


def _id(case: pytest.Item) -> str:
    spec = getattr(case, "callspec", None)
    return "" if spec is None else spec.id
