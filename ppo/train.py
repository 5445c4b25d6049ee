"""`python -m ppo.train`: PPO for language models, from the command line to the saved actor."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from accelerate.utils import set_seed

from ppo.advantages import estimate_advantages
from ppo.batch import Minibatch
from ppo.checkpoint import (
    counters,
    load_checkpoint,
    passed_over,
    random_state,
    save_checkpoint,
)
from ppo.config import Config, InputError, parse_args
from ppo.data import EncodedPrompts, encode_prompts, prompt_batches, read_prompts
from ppo.demo.build import build_demo
from ppo.metrics import peak_memory_gb, phase_seconds, rollout_metrics, update_metrics
from ppo.models import Models, load_models
from ppo.notes import model_rows, start_notes, step_notes
from ppo.report import Report, Sample
from ppo.run_folder import CONFIG, open_run, resume_command, save_models
from ppo.signals import StopRequest
from ppo.trainer import Trainer, evaluate, judge_metrics, prepare
from ppo.update import BadNumbers, update


def ppo_step(trainer: Trainer, prompts: EncodedPrompts) -> tuple[dict[str, float], list[Sample]]:
    """One step of PPO: sample, score, estimate advantages, update."""
    config, ppo, state = trainer.config, trainer.config.ppo, trainer.state
    clock = [time.perf_counter()]

    rollout = trainer.rollout(prompts)
    clock.append(time.perf_counter())

    scored = trainer.scores(rollout, prompts)
    scores = trainer.shape(scored.scores, rollout)
    look, mask = trainer.look(rollout, scores), rollout.response_mask
    kl_coef = state.kl.kl_coef
    advantages, returns = estimate_advantages(
        ppo,
        scores,
        look.kl if ppo.kl_estimator == "exact" else look.logprobs,
        look.ref_logprobs,
        look.values,
        mask,
        kl_coef=0.0 if ppo.kl_in_loss else kl_coef,
        num_samples=config.rollout.samples_per_prompt,
        bootstrap_values=trainer.bootstrap_values(look, rollout),
        impl=config.impl,
    )
    clock.append(time.perf_counter())

    batch = Minibatch(
        prompts=rollout.prompts,
        prompt_mask=rollout.prompt_mask,
        responses=rollout.responses,
        response_mask=mask,
        old_logprobs=look.logprobs,
        ref_logprobs=look.ref_logprobs,
        old_values=torch.zeros_like(advantages) if look.values is None else look.values,
        advantages=advantages,
        returns=returns,
    )
    learning_rate = float(trainer.actor.scheduler.get_last_lr()[0])
    updates = list(
        update(
            trainer.actor,
            trainer.critic,
            batch,
            ppo,
            config.optim,
            temperature=config.rollout.temperature,
            generator=trainer.generator,
            accelerator=trainer.accelerator,
            impl=config.impl,
            train_actor=trainer.train_actor,
            extras=trainer.extras(kl_coef),
            skip_bad_steps=config.skip_bad_steps,
            packed=config.models.packing,
        )
    )
    clock.append(time.perf_counter())

    metrics = {
        **rollout_metrics(
            rollout,
            look,
            scores=scored.scores,
            shaped_scores=scores,
            returns=returns,
            kl_coef=kl_coef,
            kl_in_loss=ppo.kl_in_loss,
            eos_ids=trainer.models.eos_ids,
        ),
        **{f"reward/{name}": mean for name, mean in scored.means.items()},
        **update_metrics(updates),
        **judge_metrics(trainer.judge, scored.samples),
        **phase_seconds(clock, tokens=int(rollout.attention_mask.sum())),
        "perf/peak_memory_gb": peak_memory_gb(trainer.accelerator.device),
        "lr": learning_rate,
    }
    state.kl = state.kl.updated(metrics["objective/kl"], len(prompts))
    state.rollouts += 1
    return metrics, scored.samples


def name_models(config: Config) -> Config:
    """Fill in what was not named: the embedded demo, or the actor's start as the reference.

    The run's `config.yaml` then names the reference, whatever actor a later run starts from.
    """
    if config.actor is not None:
        return replace(config, ref=config.ref or config.actor)
    demo = build_demo(Path(config.demo_dir) if config.demo_dir else None)
    return replace(
        config,
        actor=str(demo.actor),
        ref=str(demo.actor if config.models.sharing == "lora" else demo.ref),
        critic=str(demo.critic)
        if config.needs_critic and config.models.sharing == "separate"
        else None,
        reward_model=str(demo.reward_model),
        prompts=str(demo.prompts),
        eval_prompts=str(demo.eval_prompts),
        judge=config.judge or "ppo.demo.judge:vader",
    )


def load_prompts(config: Config, models: Models, key: str) -> EncodedPrompts:
    """Read and encode the prompts that this field names."""
    source = getattr(config, key)
    return encode_prompts(
        models.tokenizer,
        read_prompts(source, config.prompt_column),
        config.rollout.max_prompt_tokens,
        config.rollout.long_prompts,
        source,
        system_prompt=config.system_prompt,
        continue_assistant=config.rollout.continue_assistant,
    )


def train(config: Config) -> int:
    """Train from start to end: THE LOOP."""
    if config.threads:
        torch.set_num_threads(config.threads)
    config = name_models(config)
    set_seed(config.seed)  # fresh heads and adapters are random
    models = load_models(config)
    prompts = load_prompts(config, models, "prompts")
    held_out = load_prompts(config, models, "eval_prompts") if config.eval_prompts else None
    if held_out is not None:
        held_out = held_out.take(range(min(64, len(held_out))))
    set_seed(config.seed)
    trainer = prepare(config, models)
    run_dir, checkpoint = open_run(config)
    done = load_checkpoint(checkpoint, trainer) if checkpoint else 0
    report = Report(run_dir, config.steps, done=done)
    with report, StopRequest(report.note) as stop:
        report.models(model_rows(config, models))
        for note in start_notes(trainer, prompts):
            report.note(note)
        if checkpoint:
            report.note(f"goes on from {checkpoint}")
            for note in passed_over(checkpoint):
                report.note(note)
        try:
            if not checkpoint:
                report.before(*evaluate(trainer, held_out))
            finished = run_steps(trainer, prompts, report, stop)
        except (KeyboardInterrupt, InputError) as error:
            save_models(run_dir, models)
            report.interrupted(resume_command(run_dir))
            if isinstance(error, InputError):
                raise
            return 130
        save_models(run_dir, models)
        if not finished:
            report.interrupted(resume_command(run_dir))
            return 130
        command = resume_command(run_dir, 2 * config.steps)
        report.finish(*evaluate(trainer, held_out), command)
    return 0


def run_steps(trainer: Trainer, prompts: EncodedPrompts, report: Report, stop: StopRequest) -> bool:
    """THE LOOP; returns whether it came to its end. It leaves a checkpoint wherever it stops."""
    config, done = trainer.config, trainer.state.rollouts
    batches = prompt_batches(len(prompts), config.rollout.batch_size, config.seed, start=done)
    for step, indices in zip(range(done, config.steps), batches, strict=False):
        if stop.asked:
            return False
        moment = random_state(trainer), counters(trainer)
        try:
            batch = prompts.take(indices, config.rollout.samples_per_prompt)
            metrics, samples = ppo_step(trainer, batch)
        except (KeyboardInterrupt, InputError) as error:
            if isinstance(error, BadNumbers):
                path = report.run_dir / f"bad_minibatch_step_{step}.pt"
                torch.save(vars(error.minibatch), path)
                report.note(f"step {step}: {error}; its minibatch is in {path}")
            if counters(trainer)["schedules"] == moment[1]["schedules"]:  # nothing has moved yet
                save_checkpoint(report.run_dir, trainer, *moment, config.keep_last)
            raise
        metrics["episode"] = (step + 1) * config.rollout.responses
        report.step(step, metrics)
        for note in step_notes(config, step, metrics):
            report.note(note)
        if step % config.sample_every == 0 or step == config.steps - 1:
            report.samples(step, samples)
        every = config.checkpoint_every
        if stop.asked or (every and ((step + 1) % every == 0 or step == config.steps - 1)):
            moment = random_state(trainer), counters(trainer)
            save_checkpoint(report.run_dir, trainer, *moment, config.keep_last)
    return not stop.asked or trainer.state.rollouts >= config.steps


def settings_of_run(argv: Sequence[str]) -> Config:
    """The settings of a command line; with `--resume RUN`, on top of those of that run."""
    config = parse_args(argv)
    if config.resume in (None, "auto"):
        return config
    saved = Path(str(config.resume)) / CONFIG
    if not saved.is_file():
        raise InputError(f"resume: {config.resume} is not the folder of a run (it has no {CONFIG})")
    return parse_args(["--config", str(saved), *argv])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; bad input is one line on stderr and exit code 2."""
    try:
        return train(settings_of_run(sys.argv[1:] if argv is None else argv))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
