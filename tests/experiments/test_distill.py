"""Distillation: its graphs and keys, what it refuses, and short real runs in which the student
nears its teacher.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests import wide
from tests.bounds import gamma
from tests.tiny import make_llama, make_tokenizer, prompt_answer_rows, prompt_rows, write_jsonl
from weft.cli import overrides
from weft.cli.quickstart import apply_overrides
from weft.errors import ConfigError, UserError
from weft.experiment import Experiment
from weft.experiments import DistillConfig
from weft.experiments import distill as module
from weft.graph.mfc import HostFunction, MFCDef
from weft.launch import RunResult, run

WIDE = ("actor.dtype=float64", "teacher.dtype=float64")
REVERSE = "distill.loss_type=reverse_kl"
OFFLINE, MIXED = ("dataset.path=@rows.jsonl", "lmbda=0"), ("dataset.path=@rows.jsonl", "lmbda=0.5")


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student, a teacher whose distributions are far from flat, and prompts with and without
    answers.
    """
    folder = tmp_path_factory.mktemp("material")
    make_llama(folder / "student")
    make_llama(folder / "teacher", seed=1, initializer_range=0.2)
    write_jsonl(folder / "prompts.jsonl", prompt_rows(16))
    write_jsonl(folder / "rows.jsonl", prompt_answer_rows(16))
    return folder


def config(material: Path, *words: str) -> DistillConfig:
    """The configuration as the command line makes it; `@` is the folder of the models and the rows."""
    usual = {
        "experiment_name": "e",
        "trial_name": "t",
        "progress": "false",
        "actor.path": "@student",
        "teacher.path": "@teacher",
        "dataset.path": "@prompts.jsonl",
    }
    given = [
        word.split("=")[0].replace("teacher_model_name_or_path", "teacher.path") for word in words
    ]
    common = [f"{name}={value}" for name, value in usual.items() if name not in given]
    spelled = [word.replace("@", f"{material}/") for word in (*common, *words)]
    return apply_overrides(DistillConfig(), overrides.parse(spelled))[0]


def build(material: Path, *words: str) -> Experiment:
    experiment = config(material, *words).build()
    experiment.check()
    return experiment


# -- the graphs


def test_whole_distributions_of_what_the_student_samples(material: Path) -> None:
    experiment = build(material, "dataset.train_bs_n_seqs=4", "beta=0.3")
    assert experiment.graph.order == ("actor_gen", "teacher_inf", "actor_train")
    generate, teacher, train = (experiment.get_node(name) for name in experiment.graph.order)
    assert (generate.inputs, generate.outputs) == (
        ("prompt",),
        ("completion", "loss_mask", "finished"),
    )
    assert (teacher.inputs, teacher.outputs) == (
        ("prompt", "completion"),
        ("teacher_ids", "teacher_logprobs"),
    )
    assert teacher.args == {"outputs": ["top_ids", "top_logprobs"], "temperature": 1.0, "top_k": 64}
    assert set(train.inputs) == {
        "prompt",
        "completion",
        "loss_mask",
        "teacher_ids",
        "teacher_logprobs",
    }
    assert (train.args["loss"], train.args["loss_args"]) == (
        "gkd",
        {"divergence_beta": 0.3, "sft_coef": 0.0},
    )
    assert "share" not in generate.args
    assert experiment.dataset_type == "prompt"
    assert {node.batch_size for node in experiment.graph.nodes} == {4}
    assert (experiment.saved_roles, experiment.roles["teacher"].trained) == (("actor",), False)


def test_on_the_rows_own_completions_nothing_is_sampled(material: Path) -> None:
    experiment = build(material, *OFFLINE, "distill.sft_coef=0.5")
    assert experiment.graph.order == ("teacher_inf", "actor_train")
    train = experiment.get_node("actor_train")
    assert experiment.dataset_type == "prompt_answer"
    assert (train.optional_inputs, train.args["loss_args"]["sft_coef"]) == (("loss_mask",), 0.5)
    assert "sampled" not in train.inputs, "all rows are somebody's"
    assert build(material, *OFFLINE, "dataset.type=chat").dataset_type == "chat"
    by_tokens = build(
        material, *OFFLINE, "dataset.train_tokens_per_batch=512", "dataset.max_seqlen=64"
    )
    assert {node.batch_size for node in by_tokens.graph.nodes} == {0}


def test_a_share_is_sampled_and_keys_get_names_that_make_no_cycle(material: Path) -> None:
    experiment = build(material, *MIXED, "distill.sft_coef=0.1")
    assert experiment.graph.order == ("actor_gen", "teacher_inf", "actor_train")
    generate, teacher, train = (experiment.get_node(name) for name in experiment.graph.order)
    assert generate.args["share"] == 0.5
    assert (generate.inputs, generate.optional_inputs) == (("prompt", "completion"), ("loss_mask",))
    assert generate.outputs == ("mixed_completion", "mixed_loss_mask", "sampled")
    assert teacher.inputs == ("prompt", "mixed_completion")
    assert set(train.inputs) == {
        "prompt",
        "mixed_completion",
        "mixed_loss_mask",
        "teacher_ids",
        "teacher_logprobs",
        "sampled",
    }
    assert "sampled" not in build(material, *MIXED).get_node("actor_train").inputs


def test_reverse_kl_is_a_policy_gradient(material: Path) -> None:
    experiment = build(
        material, REVERSE, "distill.discount=0.5", "distill.eps_clip=0.1", "top_p=0.9"
    )
    assert experiment.graph.order == ("actor_gen", "teacher_inf", "advantages", "actor_train")
    generate, teacher, advantages, train = (
        experiment.get_node(name) for name in experiment.graph.order
    )
    assert {"completion", "loss_mask", "logprobs", "support", "support_counts"} <= set(
        generate.outputs
    )
    assert set(teacher.inputs) == {"prompt", "completion", "support", "support_counts"}
    assert teacher.outputs == ("teacher_logprobs", "teacher_top1")
    assert isinstance(advantages, HostFunction)
    assert (advantages.function, advantages.args) == ("teacher_advantages", {"discount": 0.5})
    assert {"logprobs", "advantages", "teacher_logprobs", "support", "support_counts"} <= set(
        train.inputs
    )
    assert train.args["loss"] == "grpo" and train.args["loss_args"]["eps_clip"] == 0.1
    plain = build(material, REVERSE)
    assert not {"support", "support_counts"} & set(plain.get_node("actor_train").inputs)
    assert "support" not in build(material, "top_p=0.9").get_node("actor_gen").outputs, (
        "distributions are compared whole"
    )


def test_the_temperature_is_the_samplers_everywhere(material: Path) -> None:
    for words in ((), (REVERSE,), MIXED, OFFLINE):
        experiment = build(material, *words, "temperature=0.7")
        calls = [node for node in experiment.graph.nodes if isinstance(node, MFCDef)]
        assert {node.args["temperature"] for node in calls} == {0.7}
    greedy = build(material, "temperature=0.7", "distill.gen.greedy=true")
    assert {
        greedy.get_node(name).args["temperature"] for name in ("teacher_inf", "actor_train")
    } == {1.0}


def test_the_learning_rate_is_that_of_supervised_methods_or_of_policies(material: Path) -> None:
    rates = [
        build(material, *words).roles["actor"].optimizer.lr
        for words in (
            (),
            ("actor.lora.r=4",),
            (REVERSE,),
            (REVERSE, "actor.lora.r=4"),
            ("learning_rate=2e-6",),
        )
    ]
    assert rates == [1e-5, 1e-5, 1e-6, 1e-5, 2e-6]


def test_what_a_step_does_is_counted_and_said(material: Path) -> None:
    words = (
        "dataset.train_bs_n_seqs=8",
        "num_generations=4",
        "distill.ppo_epochs=2",
        "distill.mini_batch_size=16",
    )
    experiment = build(material, *words, "max_new_tokens=6")
    assert experiment.updates_per_firing == {"actor_train": 4}
    assert experiment.get_node("actor_train").args["num_minibatches"] == 2
    assert experiment.plan_notes == (
        "completions of at most 6 tokens from the student",
        "a step's completions are trained on in minibatches of 16, for 2 epochs",
        "teacher: the 64 likeliest ids of each token, and one event for all others",
    )
    mixed = build(material, *MIXED, "dataset.train_bs_n_seqs=8", "max_new_tokens=6")
    assert mixed.plan_notes[0] == (
        "about 50% of the rows, chosen at random in each step, get completions of at most 6 tokens from "
        "the student"
    )
    assert (
        len(build(material, REVERSE).plan_notes) == 1
        and len(build(material, *OFFLINE).plan_notes) == 1
    )


def test_validation_asks_how_far_the_students_own_completions_are_from_the_teacher(
    material: Path,
) -> None:
    assert build(material).evaluation is None
    for words, order in (
        ((), ("actor_gen", "teacher_inf", "actor_train")),
        (MIXED, ("actor_gen", "teacher_inf", "actor_train")),
        (OFFLINE, ("teacher_inf", "actor_train")),
        ((REVERSE,), ("actor_gen", "teacher_inf", "advantages", "actor_train")),
    ):
        sft = () if not words or REVERSE in words else ("distill.sft_coef=0.1",)
        evaluation = build(material, *words, *sft, "dataset.valid_split=0.25").evaluation
        assert evaluation is not None and evaluation.graph.order == order
        train = evaluation.graph.get_node("actor_train")
        assert isinstance(train, MFCDef) and train.method == "evaluate"
        if "actor_gen" in order:
            generate = evaluation.graph.get_node("actor_gen")
            assert isinstance(generate, MFCDef) and "share" not in generate.args
            assert "completion" in generate.outputs
            assert not train.args["loss_args"].get("sft_coef")  # the student wrote all of it


def test_options_may_be_spelled_as_trls(material: Path) -> None:
    words = (
        "lmbda=0.25",
        "beta=0.9",
        "temperature=0.8",
        "max_new_tokens=7",
        "teacher_model_name_or_path=@teacher",
    )
    found = config(material, "dataset.path=@rows.jsonl", *words)
    distill = found.distill
    assert (distill.on_policy, distill.divergence_beta) == (0.25, 0.9)
    assert (distill.gen.temperature, distill.gen.max_new_tokens) == (0.8, 7)
    assert found.teacher.path == str(material / "teacher")


# -- what is refused


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("teacher.path=null",), "teacher.path is missing"),
        (("distill.on_policy=1.5",), "distill.on_policy=1.5: must be at most 1"),
        (("distill.divergence_beta=-1",), "distill.divergence_beta=-1.0: must be at least 0"),
        (("distill.top_k=0",), "distill.top_k=0: must be at least 1"),
        (
            (*MIXED, REVERSE),
            "distill.on_policy=0.5: distill.loss_type=reverse_kl is a policy gradient",
        ),
        (
            (REVERSE, "beta=0"),
            "distill.divergence_beta=0.0: has no effect with distill.loss_type=reverse_kl",
        ),
        ((REVERSE, "distill.top_k=8"), "distill.top_k=8: has no effect"),
        ((REVERSE, "distill.sft_coef=0.1"), "distill.sft_coef=0.1: has no effect"),
        (
            ("distill.discount=1",),
            "distill.discount=1.0: has no effect with distill.loss_type=gkd",
        ),
        (
            ("distill.eps_clip=0.1",),
            "distill.eps_clip=0.1: has no effect with distill.loss_type=gkd",
        ),
        (("distill.eps_clip_high=0.1",), "distill.eps_clip_high=0.1: has no effect"),
        ((REVERSE, "distill.eps_clip=2"), "eps_clip=2.0"),
        (("distill.sft_coef=0.1",), "distill.sft_coef=0.1: has no effect with distill.on_policy=1"),
        (
            (*OFFLINE, "max_new_tokens=8"),
            "distill.gen.max_new_tokens=8: has no effect with distill.on_policy=0.0",
        ),
        ((*OFFLINE, "top_p=0.9"), "distill.gen.top_p=0.9: has no effect"),
        ((*OFFLINE, "num_generations=2"), "distill.samples_per_prompt=2: has no effect"),
        (
            (*OFFLINE, "actor_gen.max_tokens_per_microbatch=512"),
            "actor_gen.*: these options are for a call that is not in this graph",
        ),
        (
            (*MIXED, "num_generations=2"),
            "distill.samples_per_prompt=2: is not possible with distill.on_policy=0.5",
        ),
        ((REVERSE, "distill.gen.greedy=true"), "a greedy completion is not a sample"),
        (
            ("distill.gen.greedy=true", "num_generations=2"),
            "the 2 greedy completions of a prompt are all the same",
        ),
        (
            ("dataset.train_tokens_per_batch=512",),
            "distill needs a fixed number of rows, unless nothing is sampled",
        ),
        (
            (*OFFLINE, "dataset.train_tokens_per_batch=512", "distill.ppo_n_minibatches=2"),
            "distill needs a fixed number of rows",
        ),
        (
            ("distill.ppo_n_minibatches=3",),
            "distill.ppo_n_minibatches=3: must divide the 32 completions",
        ),
        (
            ("teacher.prompt_prefix=Q",),
            "teacher.prompt_prefix=Q: the teacher reads the student's own tokens",
        ),
        ((*MIXED, "dataset.type=prompt"), "key 'completion'"),
    ],
)
def test_what_cannot_be_is_refused_by_name_and_rule(
    material: Path, words: tuple[str, ...], message: str
) -> None:
    with pytest.raises(UserError) as caught:
        build(material, *words)
    assert message in str(caught.value)


def other_tokens(material: Path, tmp_path: Path) -> Path:
    """The teacher with a tokenizer that has fewer merges."""
    (tmp_path / "other").mkdir()
    for file in (material / "teacher").iterdir():
        (tmp_path / "other" / file.name).write_bytes(file.read_bytes())
    make_tokenizer(tmp_path / "other", vocab_size=300)
    return tmp_path / "other"


def test_a_teacher_of_other_tokens_is_refused_with_the_options(
    material: Path, tmp_path: Path
) -> None:
    path = other_tokens(material, tmp_path)
    with pytest.raises(
        ConfigError,
        match=r"teacher\.path='.*other': \d+ tokens of its tokenizer differ from those of actor",
    ):
        build(material, f"teacher.path={path}")
    build(material, f"teacher.path={path}", f"teacher.tokenizer.path={material}/student")


def test_habits_of_a_tokenizer_may_differ(material: Path, tmp_path: Path) -> None:
    path = other_tokens(material, tmp_path)
    written = json.loads((material / "student" / "tokenizer.json").read_text())
    written["truncation"] = {
        "direction": "Right",
        "max_length": 8,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    written["added_tokens"] = written["added_tokens"][:-1]  # the configuration may add it
    (path / "tokenizer.json").write_text(json.dumps(written))
    build(material, f"teacher.path={path}")


def test_a_teacher_of_other_tokens_is_refused_before_the_start(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the options did not tell, as for names on the hub: when tokenizers are there and before
    any weights are.
    """
    monkeypatch.setattr(module, "check_same_vocabulary", lambda *roles: None)
    monkeypatch.setattr(
        "weft.launch.assemble.DeviceGroup", lambda *parts: pytest.fail("engines are built")
    )
    path = other_tokens(material, tmp_path)
    for words, keys in (((), "top_ids, top_logprobs"), ((REVERSE,), "logprobs, top1")):
        with pytest.raises(
            ConfigError, match=rf"role 'teacher' has another tokenizer .* cannot give {keys}"
        ):
            run(config(material, f"teacher.path={path}", f"fileroot={tmp_path}/runs", *words))
    assert not (tmp_path / "runs").exists()


# -- short real runs


def trained(material: Path, root: Path, *words: str) -> RunResult:
    usual = {
        "fileroot": f"{root}",
        "learning_rate": "3e-3",
        "dataset.train_bs_n_seqs": "8",
        "total_train_epochs": "15",
        "recover_mode": "disabled",
    }
    given = [word.split("=")[0] for word in words]
    return run(config(material, *(f"{n}={v}" for n, v in usual.items() if n not in given), *words))


def apart(material: Path, student: Path) -> float:
    """KL(student || teacher) at the answers of the rows, of the whole vocabulary, by
    `transformers`.
    """
    tokenizer = AutoTokenizer.from_pretrained(material / "student")
    models = [
        AutoModelForCausalLM.from_pretrained(path) for path in (student, material / "teacher")
    ]
    found = []
    for row in prompt_answer_rows(16):
        start = len(tokenizer.encode(row["prompt"]))
        ids = torch.tensor([tokenizer.encode(row["prompt"] + row["answer"])])
        with torch.no_grad():
            one, other = (model(ids).logits[0, start - 1 : -1].log_softmax(-1) for model in models)
        found.append((one.exp() * (one - other)).sum(-1))
    return float(torch.cat(found).mean())


WHOLE = "distill.top_k=1000"  # more than there are tokens


def kl_of(words: tuple[str, ...]) -> str:
    """What the KL to the teacher is called: whole distributions are compared exactly, a policy's
    samples by k3.
    """
    return "kl" if REVERSE in words else "kl_exact"


@pytest.mark.default_cases("offline-reverse", "mixed-forward")
@pytest.mark.parametrize(
    ("words", "share"),
    [
        (("max_new_tokens=8", WHOLE), 0.9),
        (("max_new_tokens=8", "beta=0", "distill.ppo_n_minibatches=2"), 0.95),
        ((*OFFLINE, "beta=1"), 0.5),
        ((*OFFLINE, "beta=0", WHOLE, "distill.sft_coef=0.02"), 0.5),
        ((*MIXED, "max_new_tokens=8", "beta=0"), 0.6),
        ((REVERSE, "max_new_tokens=8", "num_generations=8", "distill.ppo_n_minibatches=2"), 0.9),
        (
            (
                REVERSE,
                "max_new_tokens=4",
                "num_generations=8",
                "top_p=0.95",
                "distill.discount=0.5",
            ),
            0.95,
        ),
    ],
    ids=[
        "jsd",
        "forward",
        "offline-reverse",
        "offline-forward-sft",
        "mixed-forward",
        "policy-gradient",
        "top-p",
    ],
)
def test_the_student_nears_its_teacher(
    material: Path, tmp_path: Path, words: tuple[str, ...], share: float
) -> None:
    """Over the whole vocabulary, by another library; and as the run itself says, on prompts that it
    was not trained on.
    """
    before = apart(material, material / "student")
    course = (
        "learning_rate=5e-3",
        "total_train_epochs=25",
        "dataset.valid_split=0.25",
        "eval_freq_epochs=25",
    )
    result = trained(material, tmp_path, *words, *course)
    after = apart(material, result.checkpoint("actor"))
    assert after < share * before, f"{before:.3f} -> {after:.3f}"
    first, last = result.metrics[0], result.metrics[-1]
    kl = kl_of(words)
    assert 0 < last[f"eval/{kl}"] < 0.95 * first[f"actor_train/{kl}"]
    assert 0 <= last["eval/teacher_agreement"] <= 1
    if REVERSE in words:
        assert {
            "advantages/kl_k1",
            "advantages/teacher_agreement",
            "actor_train/entropy",
        } <= last.keys()
    else:
        assert last["eval/forward_kl"] < 0.95 * first["actor_train/forward_kl"]
        assert (last["actor_train/teacher_mass"] > 0.99) == (WHOLE in words)
    if "lmbda=0.5" in words:
        fractions = [line["actor_gen/sampled_fraction"] for line in result.metrics]
        assert len(set(fractions)) > 1 and 0.3 < sum(fractions) / len(fractions) < 0.7
    if "distill.sft_coef=0.02" in words:
        assert last["actor_train/nll"] < first["actor_train/nll"]
    assert (result.directory / "samples.jsonl").read_text()


@pytest.mark.parametrize(
    "words", [OFFLINE, (*MIXED, "max_new_tokens=6"), (REVERSE, "max_new_tokens=6")]
)
def test_the_modules_of_transformers_learn_the_same(
    material: Path, tmp_path: Path, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64, transformers' norms too. What is left are keys, which are stored in float32."""
    from transformers.models.llama import modeling_llama

    monkeypatch.setattr(modeling_llama, "torch", wide.TORCH)
    more = ("max_steps=3", "learning_rate=1e-3", "distill.ppo_epochs=2", *WIDE)
    own = trained(material, tmp_path / "torch", *words, *more)
    theirs = trained(
        material, tmp_path / "hf", *words, *more, "actor.backend=hf", "teacher.backend=hf"
    )
    for one, other in zip(own.metrics, theirs.metrics, strict=True):
        for name in ("loss", kl_of(words), "grad_norm"):
            assert one[f"actor_train/{name}"] == pytest.approx(
                other[f"actor_train/{name}"], rel=1e-6
            )


def test_the_cut_into_micro_batches_does_not_matter(material: Path, tmp_path: Path) -> None:
    words = (*OFFLINE, "max_steps=3", "distill.sft_coef=0.1", *WIDE)
    whole = trained(material, tmp_path / "whole", *words)
    cut = trained(
        material, tmp_path / "cut", *words, "max_tokens_per_microbatch=48", "dataset.max_seqlen=48"
    )
    for one, other in zip(whole.metrics, cut.metrics, strict=True):
        for name in ("loss", "kl_exact", "nll", "grad_norm"):
            assert one[f"actor_train/{name}"] == pytest.approx(
                other[f"actor_train/{name}"], rel=1e-8
            ), "a few of the teacher's log-probs may round to another float32"


def test_a_teacher_that_is_the_student_without_adapters(material: Path, tmp_path: Path) -> None:
    """One engine serves both; a new adapter changes nothing yet, so they are not apart.

    In float64, the teacher's log-probs l are stored in float32, which is wrong by a sum of p |l|, at
    most the entropy of a vocabulary of 320, times the rounding.
    """
    more = ("teacher.path=@student", "actor.lora.r=4", "max_steps=2", "distill.sft_coef=1", *WIDE)
    result = trained(material, tmp_path, *OFFLINE, *more)
    assert (
        abs(result.metrics[0]["actor_train/kl_exact"])
        < gamma(2) * math.log(320)
        < result.metrics[1]["actor_train/kl_exact"]
    )


def test_a_teacher_with_more_outputs_than_tokens(material: Path, tmp_path: Path) -> None:
    """Sizes of one family round the vocabulary up differently; the ids beyond it are nobody's."""
    model = AutoModelForCausalLM.from_pretrained(material / "teacher")
    size = model.config.vocab_size
    model.resize_token_embeddings(size + 8, mean_resizing=False)
    with torch.no_grad():
        model.lm_head.weight[size:] = 0.3  # some of them are likely
    model.save_pretrained(tmp_path / "wide")
    make_tokenizer(tmp_path / "wide")
    for beta in (0, 1):
        words = (*OFFLINE, "max_steps=1", f"beta={beta}", f"teacher.path={tmp_path}/wide")
        for count in (1000, 16):
            result = trained(
                material, tmp_path / f"{beta}-{count}", *words, f"distill.top_k={count}"
            )
            assert 0 < result.metrics[0]["actor_train/loss"] < 5


def test_a_run_goes_on_bit_for_bit(material: Path, tmp_path: Path) -> None:
    words = (
        *MIXED,
        "max_new_tokens=6",
        "total_train_epochs=4",
        "recover_freq_steps=1",
        "recover_mode=auto",
        "warmup_steps=0",
    )
    whole = trained(material, tmp_path / "whole", *words)
    trained(material, tmp_path / "begun", *words, "max_steps=3")
    again = trained(material, tmp_path / "again", *words, f"resume_from={tmp_path}/begun/e/t")
    files = [result.checkpoint("actor") / "model.safetensors" for result in (whole, again)]
    assert files[0].read_bytes() == files[1].read_bytes()
