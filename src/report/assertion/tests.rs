//! What is understood, what is not, and what holds.

use super::*;
use crate::json::{ProgramFigures, SplitFigures, Summary};
use crate::objective::ObjectiveFigures;
use crate::served::{Ending, QueueOutcome, Queued, Served};
use crate::tally::Tally;
use crate::tests::report;
use attache_scheduling::objective::{Objective, Slo};
use attache_types::clock::Timestamp;

const POLICIES: &[&str] = &["random", "least-request", "2-choices"];

#[test]
fn understood() {
    for text in [
        "ttft_p90<1.2s",
        "ttft_p90 <= 1200 ms",
        " tpot_mean<900us ",
        "hit_rate>=40%",
        "hit_rate>0.4",
        "imbalance<1.5",
        "throughput>=10.5",
        "error_rate<=0",
        "random:ttft_mean>1e-3s",
        "least-request:ttft_mean<0.7*random:ttft_mean",
        "least-request : ttft_mean < 0.7 * random : ttft_mean",
        "ttft_p99<10*ttft_p50",
        "ttft_mean<2-choices:ttft_p99",
        "lost<1",
    ] {
        if let Err(error) = Assertion::parse(text, POLICIES) {
            panic!("{text}: {error}");
        }
    }
}

#[test]
fn not_understood() {
    for (text, part) in [
        ("", "no operator"),
        ("ttft_p90", "no operator, one of < <= > >= is needed"),
        ("ttft_p90=1s", "no operator"),
        ("ttft_p9O<1s", "unknown metric `ttft_p9O` (did you mean `ttft_p90`?), allowed: ttft_mean, ttft_p50"),
        ("<1s", "unknown metric ``"),
        ("nonsense<1s", "unknown metric `nonsense`, allowed"),
        (
            "randon:ttft_mean<1s",
            "unknown policy `randon` (did you mean `random`?), in this run: random, least-request, 2-choices",
        ),
        ("ttft_mean<0.5*nobody:ttft_mean", "unknown policy `nobody`"),
        ("ttft_mean<1", "ttft_mean is compared with a number in us, ms or s, got `1`"),
        ("ttft_mean<1m", "got `1m`"),
        ("ttft_mean<1%", "got `1%`"),
        ("hit_rate>1s", "hit_rate is compared with a number in % or from 0 to 1"),
        ("imbalance<2%", "imbalance is compared with a number without a unit"),
        ("ttft_mean<1.2.3s", "`1.2.3` is not a number"),
        ("ttft_mean<", "`` is not a number"),
        ("ttft_mean<=>1s", "unknown metric `>1s`"),
        ("ttft_mean<half*ttft_p99", "`half` is not a number"),
        ("ttft_mean<inf*ttft_p99", "`inf` is not a number"),
        ("ttft_mean<hit_rate", "ttft_mean and hit_rate have different units"),
    ] {
        let error = Assertion::parse(text, POLICIES).unwrap_err().to_string();
        assert!(error.contains(part), "{text}: {error}");
        assert!(error.starts_with(&format!("assertion `{text}`: ")), "{error}");
    }
}

fn outcomes(text: &str) -> Vec<AssertionResult> {
    let document = report().document();
    Assertion::parse(text, &document.policies()).unwrap().check(&document)
}

#[test]
fn each_run_is_judged_with_its_figures() {
    // In the report `least-request` has half of random's time to first token, in both cells.
    let all = outcomes("ttft_mean<0.6s");
    assert_eq!(all.iter().map(|o| o.passed).collect::<Vec<_>>(), [false, true, false, true]);
    assert_eq!(
        all.first().unwrap().line,
        "FAIL ttft_mean<0.6s: random 1.00 s not < 600 ms (chat <1>, endpoints 2, speed 1.0)"
    );
    let own = outcomes("least-request:ttft_mean<=0.6*random:ttft_mean");
    assert_eq!(own.len(), 2);
    assert!(own.iter().all(|outcome| outcome.passed));
    assert_eq!(
        own.first().unwrap().line,
        "pass least-request:ttft_mean<=0.6*random:ttft_mean: least-request 500 ms <= 600 ms = 0.6 * 1.00 s of random \
         (chat <1>, endpoints 2, speed 1.0)"
    );
    assert!(outcomes("least-request:ttft_mean<0.4*random:ttft_mean").iter().all(|outcome| !outcome.passed));
    assert!(outcomes("ttft_mean<=ttft_p99").iter().all(|outcome| outcome.passed));
}

#[test]
fn a_figure_that_does_not_exist_holds_nothing() {
    for text in ["goodput<=1", "goodput>=0"] {
        let all = outcomes(text);
        assert!(!all.is_empty() && all.iter().all(|outcome| !outcome.passed), "{text}");
        assert!(all.first().unwrap().line.contains("random none not"), "{}", all.first().unwrap().line);
    }
    let mut document = report().document();
    let assertion = Assertion::parse("random:lost<1", &document.policies()).unwrap();
    document.runs.clear();
    assert_eq!(
        assertion.check(&document),
        [AssertionResult { passed: false, line: "FAIL random:lost<1: there is no such run".to_owned() }]
    );
}

#[test]
fn each_metric_is_found_by_a_name_of_its_own() {
    let mut report = report();
    let waited = std::time::Duration::from_secs(1);
    let at = attache_types::clock::Timestamp(0);
    let queued = Queued { number: 0, at, priority: 0, tenant: None, waited, outcome: QueueOutcome::Passed };
    report.runs.first_mut().unwrap().tally.queued(&queued);
    let mut document = report.document();
    let run = document.runs.first_mut().unwrap();
    run.split = Some(SplitFigures {
        share: Some(0.25),
        fell_back: 0,
        transfer_seconds: Some(0.03),
        received_tokens: 1_000,
        prefill_busy: Some(0.5),
        decode_busy: Some(1.0),
    });
    let slo = Slo { ttft: Some(waited), tpot: None, share: 0.9 };
    let mut aimed = Tally::new(1).with_objective(Some(Objective { slo: Some(slo), ..Objective::default() }));
    aimed.add(&Served {
        number: 0,
        pair: 0,
        at: Timestamp(0),
        endpoint: Some(0),
        prompt_tokens: 1_000,
        expected_cached_tokens: 0,
        cached_tokens: 0,
        generated_tokens: 11,
        first_token: Some(waited),
        total: 2 * waited,
        preemptions: 0,
        ending: Ending::Answered,
        handover: None,
        fell_back: false,
        turn: None,
        alone: None,
    });
    run.objective = aimed.objective().map(ObjectiveFigures::of);
    let one = Summary { count: 1, mean: Some(1.0), p50: Some(1.0), p99: Some(1.0), max: Some(1.0) };
    run.programs = Some(ProgramFigures {
        started: 1,
        complete: 1,
        incomplete: 0,
        time_seconds: one,
        by_turns: Vec::new(),
        ttft_first_seconds: one,
        ttft_tool_seconds: one,
        ttft_person_seconds: one,
        ttft_long_pause_seconds: one,
        recomputed_tokens: 7,
        moves: Some(1.0),
        slowdown: one,
        jain: Some(1.0),
    });
    for (at, metric) in METRICS.iter().enumerate() {
        assert_eq!(METRICS.iter().position(|other| other.name == metric.name), Some(at), "{metric:?} comes twice");
        assert!(!metric.doc.is_empty());
        assert!((metric.of)(run).is_some() || metric.name == "goodput", "{metric:?} has no figure");
    }
}
