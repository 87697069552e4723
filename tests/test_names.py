"""Plain English, as far as it can be counted: names, line lengths, density, docstring openings."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src" / "weft"
RENAMED = SOURCE.parents[1] / "docs" / "decisions" / "2026-11-27-names.txt"
# names in the right column of that table that weft has no longer
REMOVED = """
_apply_softcap _find_deciding_metric _format_step _parse_count _parse_positive is_table_dataset
ADAPTED_MATRICES ConsecutiveRowSharing CovarianceControl EventSink ExpertExchange ExpertFunction
FeedForwardArguments GroupExpertExchange GroupVocabularySplit NUMBER_TYPES REQUIRED_OPTIONS
SAMPLING_OPTIONS SHAPING_OPTIONS SampleLengths _OutputAnnouncer _QueuedFunction _build_checked
_build_layout_filter _build_problem _build_reward_args _build_staleness_notes _build_step_notes
_can_compile _check_staleness _compute_split_results _copy_dpo_option _count
_count_adapter_activations _fail_future _find_likeliest _find_reward_problem _gather_logits
_get_run_id _has_option _import_sink _launch_devices _list_age_keys _name_meshes _open_tensors
_place_prefix _print_message _read_slices _run_and_report _scatter_values _strip_trlx_prefixes
_with_staleness _choose_newest build_parts build_training_case check_shared_options format_epochs
format_role_name format_start_line gather_inputs insert_prefix overwrite_prefix to_local_ids
weight_policy_loss _compute_attention_width _mask_values _repeat_scales get_loss_name
_choose_holder _drop_metadata hash_contents _build_dark_rules _get_capability _select_names
_compute_mean _build_chart_data _cut_lines _embed_image _has_reward_instead _is_same_curve
_read_id _render_cells _render_first_steps _render_log _render_option _render_section _render_tab
_sort_ranked find_undescribed read_script render_log _build_conversation _build_hint
_choose_default_split _collect_arguments _encode_lines _find_opening _find_started_run
_format_paragraphs _is_for_training _is_hidden _iterate_dialogue _iterate_stated_languages
_list_files _list_keys _list_missing_fields _list_nested_groups _normalize_split _parse_registered
build_no_eos_error build_no_template_error count_common_end find_unwanted_phrase format_part_name
has_leading_bos require_bos take_rows _accepts_text _build_timeout_trouble _build_word_pattern
_build_yaml_error _collect_texts _escape_label _find_first_option _find_names _format_address
_format_numbers _is_head_norm _is_metrics_mapping _is_installed _choose_unit _iterate_sampling
iterate_length_statistics REACHED_FLOPS_SHARE REACHED_LINK_SHARE _compute_present_share
_compute_stored_share MAX_EXHAUSTIVE _format_stages find_tied_copies format_key_table with_layer
build_prompt estimate_call_seconds estimate_role_memory _build_example
_compare_known _split_words _compute_plain_frequencies
_build_reply_trouble _take_rectangles _to_cells _to_rows to_whole take_expert_loads
"""
DEFINED = re.compile(r"^ *(?:async )?(?:class|def) (\w+)|^(\w+)(?:: .*)? = ", re.MULTILINE)
COLUMNS = 100
LONGER_LINES = 0.01  # share of the lines that may be longer: markup, tables, addresses

# Most per 1,000 lines. Above these, a line holds more than one idea.
DENSITY = {"conditional expressions": 22.0, "comprehensions": 32.0, "tuple assignments": 5.0}

# Classes of one word: terms of the field or of weft's vocabulary that need no second word.
ONE_WORD_CLASSES = """
Adapter Attention Block Cached Call Chart Collectives Control Conversation Dashboard Decoder Demo
Dense Embedding Engine Evaluation Evaluator Example Experiment Experts Family Firing Generator
Interrupted Judge Key Layout Linear Lion Loss MLP Master Max Mesh Microbatch Min Minibatches
Model Norm Offload Optimizer Override Packed Page Paged Partial Pipeline Placement Prefill
Prefixed Quantized Reallocation Registry Request Rope SGD Sample Schedule Scheduler Scheduling
Sequence Server Session Sum Supervisor Timeline Tokenizer Trackio Transformer Wandb Worker
Workers
"""

# First words of functions and methods.
VERBS = """
abort accept accumulate activate adapt add adjust admit adopt advance advise agree align allocate
allot allow amend anneal announce answer append apply approximate arrange ask assemble assign
attach attend augment average await begin bind bound bring build call cancel capture cast catch
change check choose clean clear clip close coerce collect combine come compare compile complete
compress compute concatenate configure confirm connect construct continue converse convert copy
count create cut decide decode decompress define delete denormalize dequantize derive descend describe detect
diagnose disable discard divide download draw drop dry elide embed encode end ensure enter escape
estimate evaluate exchange expand expect explain export extend extract fail feed fetch fill
filter find finish fit flatten flip flush fold follow forecast forget fork format forward free
freeze fuse gather generate get give group grow guess handle hash hide hold identify ignore
import include index infer initialize insert install invert isolate issue iterate join judge keep kill
label launch lay leave limit link list load locate lock log look make map mark mask match measure
merge minimize mirror mount move multiply name narrow nest next normalise normalize note number
offload onload open order overlap override overwrite pack pad parse partition pass pause peek
permute pick place plan poll post predict prefetch prefill prefix prepare prepend print
prioritize process project propose prune put qualify quantize query raise rank reach read
reallocate rearrange rebuild receive recompute record redact reduce refresh refuse register
regroup reject relaunch release remap remove rename render renew reorder repeat replace reply
report request require reserve reset reshape reshard resize resolve restart restore restrict
resume retry reuse rewrite rotate round route run sample save scale scan scatter score search
select send separate serve set settle shape shard share shorten show shuffle silence simulate
skip slice snapshot sort split spread start state step stop store stream strip submit subtract
suggest sum summarize switch sync synchronize take tell thin tidy time toggle tokenize trace track train
transfer translate truncate try turn unfuse ungroup unpack unset unshard unshare unwrap update upload
use validate verify view vote wait weight whiten widen wrap write zero
"""
PREFIXES = """
accepts are can differs does from has have implements is may must needs on restricts samples
satisfies serves should supports to tolerates uses was were with
"""

# Functions with other names: those that users' code calls or registers, methods of libraries'
# interfaces, and functions that are known by the name of their formula.
OTHER_FUNCTIONS = """
_ModelInfer _ModelMetadata _ModelReady _ServerLive _ServerMetadata _ServerReady _abs _all_gather
_all_to_all _binom _ceil _factorial _floor _loglikelihood_tokens _negative _pair_with_local _power _root activated
activated_linear activation activity all_gather argmax at augmented auto_backend backward
by_system checkpoint code comparisons config control denominators divemt do_GET dynamic_sampling
each endings engine error exact exp_ratio extra fixed fused generating gpt4all grouped_linear
gsm8k hf_backend jax_backend hh holdings_of ifeval in_vectors inference init_random initial_setup items
keymap kto_baseline kto_mismatch layer_types layer_windows length like linear llama_attention
llama_ends llama_fields llama_keys llama_mlp llama_norms llama_values loglikelihood loglikelihood_rolling logsumexp main marked
masked_mean math_answer messages meta metrics minibatches missing need norm null num_sequences
num_tokens numpy one_per one_window optimal_transport option pair_short pairs parameters
peak_memory_gb plain_text planned product question_answer ranked_list rms_norm rope_values rounds
scored sequences service sharegpt slices soda statistics summary tensor threefry tok_encode token_costs
torch_backend translation trees updates veto weights_changed wide_product window without_adapters
"""

# Words that name nothing when they stand alone.
PARTICIPLES = """told heard gone kept stayed made found shown said asked"""


# Words that begin a relative clause or a phrase whose noun stands elsewhere.
STILTED_OPENING = re.compile(r"(Whether|Which|Where|What|How|Why|Of|As|Those|That|One that)\b")


parse = functools.cache(ast.parse)  # several tests look at all files


def read_sources() -> dict[Path, str]:
    """Return the source text of each module, by its path below `src/weft`."""
    return {path.relative_to(SOURCE): path.read_text() for path in sorted(SOURCE.rglob("*.py"))}


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the docstring of each function, method and class that has one."""
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield node.lineno, text


def definitions(source: str) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the nodes of all classes, functions and methods, properties and dunders left out."""
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.ClassDef):
            yield node
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            decorators = " ".join(ast.unparse(decorator) for decorator in node.decorator_list)
            is_property = "property" in decorators or ".setter" in decorators
            if not is_property and not node.name.startswith("__"):
                yield node


def is_function_name(name: str) -> bool:
    """Return whether a function may have this name."""
    first = name.lstrip("_").split("_")[0]
    return name in OTHER_FUNCTIONS.split() or first in f"{VERBS} {PREFIXES}".split()


def find_participles(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and name of each variable, parameter or attribute that is a participle."""
    for node in ast.walk(parse(source)):
        name = ""
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.arg):
            name = node.arg
        if name.lstrip("_") in PARTICIPLES.split():
            yield node.lineno, name


def find_bad_names(sources: dict[Path, str]) -> list[str]:
    """Return one line for each class and function whose name breaks a rule."""
    found = []
    defined: dict[str, Path] = {}
    for path, source in sources.items():
        for node in definitions(source):
            name = node.name.lstrip("_")
            place = f"{path}:{node.lineno}: {node.name}"
            if isinstance(node, ast.ClassDef):
                other = defined.setdefault(name, path)
                if other != path:
                    found.append(f"{place} is defined in {other} too")
                words = re.findall(r"[A-Z]+(?![a-z])|[A-Z][a-z0-9]*", name)
                if len(words) == 1 and name not in ONE_WORD_CLASSES.split():
                    found.append(f"{place} is one word; name what it is of or for")
            elif name in PARTICIPLES.split():
                found.append(f"{place} is a participle; begin with a verb")
            elif not is_function_name(node.name):
                found.append(f"{place} does not begin with a known verb")
    return found


def count_dense_lines(source: str) -> dict[str, int]:
    """Return the number of expressions of each kind in `DENSITY`."""
    counts = dict.fromkeys(DENSITY, 0)
    comprehensions = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.IfExp):
            counts["conditional expressions"] += 1
        elif isinstance(node, comprehensions):
            counts["comprehensions"] += 1
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            counts["tuple assignments"] += isinstance(node.targets[0], ast.Tuple)
    return counts


def test_names_say_what_they_are():
    assert find_bad_names(read_sources()) == []


def test_the_table_of_renamed_names_has_the_names_of_today():
    """Rows without a dot on the left are classes, functions and constants of a module."""
    sources = read_sources()
    defined = set(REMOVED.split())
    for source in sources.values():
        defined.update(match[1] or match[2] for match in DEFINED.finditer(source))
    rows = [line.split(" -> ") for line in RENAMED.read_text().splitlines() if " -> " in line]
    modules = {new for old, new in rows if old.endswith(".py")}
    names = {new for old, new in rows if "." not in old}
    assert len(modules) > 20 and len(names) > 2000
    assert modules - {path.as_posix() for path in sources} == set()
    assert names - defined == set()


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("class Thing: ...", "one word"),
        ("class _SampleReader: ...", "defined in"),
        ("def told(): ...", "participle"),
        ("def anew_things(): ...", "verb"),
        ("class SampleWriter:\n    def anew(self): ...", "verb"),
    ],
)
def test_bad_names_are_found(source, problem):
    sources = {Path("a.py"): "class SampleReader: ...", Path("b.py"): source}
    (line,) = find_bad_names(sources)
    assert problem in line


@pytest.mark.parametrize(
    "source", ["found = 1", "self._kept = 1", "def read(told): ...", "for made in x: ..."]
)
def test_participles_are_found(source):
    assert len(list(find_participles(source))) == 1


def test_variables_say_what_they_hold():
    assert [
        f"{path}:{line}: {name}"
        for path, source in read_sources().items()
        for line, name in find_participles(source)
    ] == []


def test_good_names_are_let_through():
    source = "class SampleReader:\n    def read_line(self): ...\n    def is_open(self): ..."
    assert find_bad_names({Path("a.py"): source}) == []


def test_lines_are_at_most_100_columns_wide():
    lines = [line for text in read_sources().values() for line in text.splitlines()]
    longer = [line for line in lines if len(line) > COLUMNS]
    assert len(longer) < LONGER_LINES * len(lines), f"{len(longer)} of {len(lines)} lines"


def test_no_statement_is_kept_from_the_formatter():
    assert [str(path) for path, text in read_sources().items() if "# fmt: " in text] == []


def test_a_line_holds_one_idea():
    sources = read_sources().values()
    lines = sum(bool(line.strip()) for text in sources for line in text.splitlines())
    counts = [count_dense_lines(text) for text in sources]
    for kind, most in DENSITY.items():
        found = sum(count[kind] for count in counts) / lines * 1000
        assert found <= most, f"{found:.1f} {kind} per 1,000 lines; at most {most:g}"


def test_docstrings_begin_with_a_verb_or_a_noun():
    stilted = [
        f"{path}:{line}: {text.splitlines()[0]}"
        for path, source in read_sources().items()
        for line, text in docstrings(source)
        if STILTED_OPENING.match(text)
    ]
    assert not stilted, "\n".join(stilted)


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("x = 1 if y else 2", "conditional expressions"),
        ("x = [y for y in z]", "comprehensions"),
        ("x, y = 1, 2", "tuple assignments"),
    ],
)
def test_what_is_dense_is_counted(source, kind):
    assert count_dense_lines(source) == {name: int(name == kind) for name in DENSITY}


@pytest.mark.parametrize("text", ["Whether anything is.", "Of one step.", "What is done."])
def test_riddles_are_found(text):
    assert STILTED_OPENING.match(text)
