"""`python -m ppo.train`: PPO for language models, from the command line to the saved actor."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from accelerate.utils import set_seed
from torch import Tensor

from ppo.advantages import grpo, reinforce_pp, rloo
from ppo.batch import Minibatch
from ppo.checkpoint import go_on_command, new_run_dir, save_models
from ppo.config import Config, InputError, parse_args
from ppo.data import EncodedPrompts, encode_prompts, prompt_batches, read_prompts
from ppo.demo.build import build_demo
from ppo.metrics import rollout_metrics, update_metrics
from ppo.models import Models, load_models
from ppo.report import ModelRow, Report, Sample
from ppo.trainer import Look, Trainer, evaluate, judge_metrics, prepare
from ppo.update import update
from ppo_kernels import ppo_advantages, token_rewards, whiten


def ppo_step(trainer: Trainer, rows: list[list[int]]) -> tuple[dict[str, float], list[Sample]]:
    """One step of PPO: sample, score, estimate advantages, update."""
    config, ppo, clock = trainer.config, trainer.config.ppo, [time.perf_counter()]

    rollout = trainer.rollout(rows, config.rollout.samples_per_prompt)
    clock.append(time.perf_counter())

    scores, samples = trainer.scores(rollout)
    shaped_scores = trainer.shape(scores, rollout)
    look = trainer.look(rollout)
    mask = rollout.response_mask
    kl_coef = trainer.state.kl.kl_coef
    advantages, returns = estimate_advantages(config, shaped_scores, look, mask, kl_coef)
    clock.append(time.perf_counter())

    batch = Minibatch(
        prompts=rollout.prompts,
        prompt_mask=rollout.prompt_mask,
        responses=rollout.responses,
        response_mask=mask,
        old_logprobs=look.logprobs,
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
            temperature=config.rollout.temperature,
            max_grad_norm=config.optim.max_grad_norm,
            generator=trainer.generator,
            accelerator=trainer.accelerator,
            impl=config.impl,
        )
    )
    clock.append(time.perf_counter())

    metrics = {
        **rollout_metrics(
            rollout,
            scores=scores,
            shaped_scores=shaped_scores,
            logprobs=look.logprobs,
            ref_logprobs=look.ref_logprobs,
            entropy=look.entropy,
            values=look.values,
            returns=returns,
            kl_coef=kl_coef,
            kl_estimator=ppo.kl_estimator,
            eos_ids=trainer.models.eos_ids,
        ),
        **update_metrics(updates),
        **judge_metrics(trainer.judge, samples),
        **phase_seconds(clock, tokens=int(rollout.attention_mask.sum())),
        "lr": learning_rate,
    }
    trainer.state.kl = trainer.state.kl.updated(metrics["objective/kl"], len(samples))
    return metrics, samples


def estimate_advantages(
    config: Config, scores: Tensor, look: Look, mask: Tensor, kl_coef: float
) -> tuple[Tensor, Tensor]:
    """Advantages and returns, [B,T]; without a critic the returns are 0 and nothing reads them."""
    ppo, impl = config.ppo, config.impl
    if look.values is not None:
        advantages, returns, moments = ppo_advantages(
            scores,
            look.logprobs,
            look.ref_logprobs,
            look.values,
            mask,
            kl_coef=kl_coef,
            estimator=ppo.kl_estimator,
            gamma=ppo.gamma,
            gae_lambda=ppo.gae_lambda,
            impl=impl,
        )
        if ppo.whiten_advantages:
            advantages = whiten(advantages, mask, moments=moments, impl=impl)
        return advantages, returns
    rewards = token_rewards(
        scores,
        look.logprobs,
        look.ref_logprobs,
        mask,
        kl_coef=kl_coef,
        estimator=ppo.kl_estimator,
        impl=impl,
    )
    samples = config.rollout.samples_per_prompt
    if ppo.advantage_estimator == "reinforce_pp":
        advantages = reinforce_pp(rewards, mask, gamma=ppo.gamma, impl=impl)
    elif ppo.advantage_estimator == "rloo":
        advantages = rloo(rewards.sum(1), mask, num_samples=samples)
    else:
        advantages = grpo(rewards.sum(1), mask, num_samples=samples)
    return advantages, torch.zeros_like(advantages)


def phase_seconds(clock: Sequence[float], tokens: int) -> dict[str, float]:
    """Seconds of generation, scoring and update, and prompt and response tokens per second."""
    names = ("time/generate", "time/score", "time/update")
    seconds = {name: clock[i + 1] - clock[i] for i, name in enumerate(names)}
    total = clock[-1] - clock[0]
    return {**seconds, "time/step": total, "perf/tokens_per_s": tokens / total}


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
        ref=str(demo.ref),
        critic=str(demo.critic) if config.ppo.advantage_estimator == "gae" else None,
        reward_model=str(demo.reward_model),
        prompts=str(demo.prompts),
        eval_prompts=str(demo.eval_prompts),
        judge=config.judge or "ppo.demo.judge:vader",
    )


def model_rows(config: Config, models: Models) -> list[ModelRow]:
    """Who is who: role, source, architecture, size, and whether it trains."""
    roles = (
        ("actor", config.actor, models.actor.model, True),
        ("critic", models.critic_source, models.critic.trunk if models.critic else None, True),
        ("reference", config.ref, models.ref.model, False),
        ("reward model", config.reward_model, models.reward_model, False),
    )
    return [
        ModelRow(role, str(source), type(model).__name__, model.num_parameters(), trains)
        for role, source, model, trains in roles
        if model is not None
    ]


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
    models = load_models(config)
    prompts = load_prompts(config, models, "prompts")
    held_out = load_prompts(config, models, "eval_prompts").rows[:64] if config.eval_prompts else []
    set_seed(config.seed)
    trainer = prepare(config, models)
    run_dir = new_run_dir(config)
    batches = prompt_batches(len(prompts.rows), config.rollout.batch_size, config.seed)

    with Report(run_dir, config.steps) as report:
        report.models(model_rows(config, models))
        for role, policy in (("actor", models.actor), ("reference", models.ref)):
            if policy.why_logits:
                report.note(f"{role}: logits are made in full, because {policy.why_logits}")
        report.dropped(prompts.dropped, config.rollout.max_prompt_tokens)
        if prompts.truncated:
            report.note(
                f"{prompts.truncated} prompts cut to their last "
                f"{config.rollout.max_prompt_tokens} tokens (rollout.long_prompts truncate)"
            )
        step = 0
        try:
            before, samples_before = evaluate(trainer, held_out)
            for step, indices in zip(range(config.steps), batches, strict=False):
                metrics, samples = ppo_step(trainer, [prompts.rows[index] for index in indices])
                metrics["episode"] = (step + 1) * config.rollout.responses
                report.step(step, metrics)
                taken = int(metrics["policy/updates"])
                if taken < config.ppo.ppo_epochs * config.ppo.num_minibatches:
                    epoch = taken // config.ppo.num_minibatches + 1
                    report.note(
                        f"step {step}: updates stopped in epoch {epoch} after {taken} steps, "
                        f"approx_kl passed {config.ppo.target_kl} (ppo.target_kl)"
                    )
                if step % config.sample_every == 0 or step == config.steps - 1:
                    report.samples(step, samples)
            after, samples_after = evaluate(trainer, held_out)
        except (KeyboardInterrupt, InputError) as stop:
            save_models(run_dir, models.actor.model, models.critic, models.tokenizer)
            report.interrupted(go_on_command(run_dir, max(1, config.steps - step)))
            if isinstance(stop, InputError):
                raise
            return 130
        save_models(run_dir, models.actor.model, models.critic, models.tokenizer)
        summary = {f"{name} before": figure for name, figure in before.items()}
        summary |= {f"{name} after": figure for name, figure in after.items()}
        report.finish(summary, samples_before, samples_after, go_on_command(run_dir, config.steps))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; bad input is one line on stderr and exit code 2."""
    try:
        return train(parse_args(sys.argv[1:] if argv is None else argv))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
