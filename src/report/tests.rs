//! The forms of a report, read back.

use super::json::Document;
use super::table::{MIN_WIDTH, TableStyle};
use super::*;
use crate::served::{Ending, QueueOutcome, Queued, Sample, Served};
use crate::tally::queueing::{self, Queueing};
use attache_types::clock::Timestamp;
use proptest::prelude::*;

mod pages;
mod programs;

/// `least-request` has half of random's time to first token; random loses each 20th request.
fn run(policy: &str, speed: &str, requests: u64) -> RunResult {
    let random = policy == "random";
    let mut tally = Tally::new(2);
    for number in 0..requests {
        let share = if random { 1.0 } else { 0.5 };
        let first_token = Duration::from_secs_f64(share * if number % 2 == 0 { 0.8 } else { 1.2 });
        let lost = random && number % 20 == 19;
        tally.add(&Served {
            number,
            pair: number,
            at: Timestamp(number * 250_000_000),
            endpoint: Some(u32::from(number % 3 == 0)),
            prompt_tokens: 1_000,
            expected_cached_tokens: 400,
            cached_tokens: if random { 100 } else { 300 },
            generated_tokens: 101,
            first_token: Some(first_token),
            total: first_token + Duration::from_secs(2),
            preemptions: u32::from(number == 3),
            ending: if lost { Ending::Lost } else { Ending::Answered },
            handover: None,
            fell_back: false,
            turn: None,
            alone: None,
        });
        let sample = |share: u64| Sample {
            running: (number % 5) as u32,
            waiting: u32::from(random),
            kv_usage: 0.5,
            prefix_queries: number * 1_000,
            prefix_hits: number * share,
        };
        tally.sample(Timestamp(number * 250_000_000), &[sample(100), sample(300)]);
    }
    RunResult {
        policy: policy.to_owned(),
        workload: "chat <1>".to_owned(),
        cell: BTreeMap::from([("endpoints".to_owned(), "2".to_owned()), ("speed".to_owned(), speed.to_owned())]),
        simulated: tally.duration(),
        tally,
        decisions: 0xfeed_0000_0000_0001,
        servers: vec![server("server-0", 0.001), server("server-1", 0.001)],
        failures: BTreeMap::new(),
        took: Duration::from_millis(12),
    }
}

fn server(name: &str, gpu_seconds_per_token: f64) -> ServerFacts {
    ServerFacts { name: name.to_owned(), gpu_seconds_per_token }
}

#[test]
fn what_is_saved_has_the_price_of_the_server_that_saved_it() {
    let mut run = run("random", "1.0", 30);
    // A third of the requests went to the second, each with 100 cached tokens.
    run.servers = vec![server("a", 0.001), server("b", 0.004)];
    let figures = Report { runs: vec![run], ..report() }.document().runs.remove(0);
    assert!((figures.gpu_seconds_saved - (2_000.0 * 0.001 + 1_000.0 * 0.004)).abs() < 1e-9);
    assert_eq!(figures.endpoints.iter().map(|e| e.name.as_str()).collect::<Vec<_>>(), ["a", "b"]);
}

#[test]
fn why_requests_failed_and_what_servers_are_called_stands_in_the_figures_and_on_the_page() {
    let mut run = run("random", "1.0", 30);
    run.failures = BTreeMap::from([("status 503 (<full>)".to_owned(), 7)]);
    let of = |reason: u64| (format!("reason {reason}"), reason);
    let mut many = Report { runs: vec![run.clone()], ..report() }.document();
    many.runs[0].failures.extend((1..=6).map(of));
    let text = table::render(&many, TableStyle::default());
    let reasons = "7 status 503 (<full>), 6 reason 6, 5 reason 5, 4 reason 4, 3 reason 3, 3 for other reasons\n";
    assert!(text.contains(&format!("%): {reasons}")), "{text}");
    let document = Report { runs: vec![run], ..report() }.document();
    assert_eq!(document.runs[0].failures["status 503 (<full>)"], 7);
    assert!(html::render(&document).contains("<li>7: status 503 (&lt;full&gt;)</li>"));
    let labels: Vec<String> = document.runs[0].endpoints.iter().zip(0..).map(|(e, i)| e.label(i)).collect();
    assert_eq!(labels, ["server-0", "server-1"]);
}

/// Two policies in two cells.
pub(super) fn report() -> Report {
    let cell = |speed| [run("random", speed, 1_200), run("least-request", speed, 1_200)];
    Report {
        runs: [cell("1.0"), cell("1.15")].concat(),
        baseline: 0,
        command: "attache replay --trace '<script>alert(\"x\")</script>'".to_owned(),
        seed: u64::MAX,
        config: "pools:\n  - name: </pre><script>alert(1)</script> & more\n".to_owned(),
    }
}

#[test]
fn the_table_reads_like_this() {
    let document = report().document();
    let text = table::render(&document, TableStyle::default());
    let first = text.split("\n\n").next().unwrap();
    assert_eq!(
        first,
        "\
chat <1>, endpoints 2, speed 1.0
policy         TTFT mean, s    p50    p90    p99  TPOT mean, ms    p99  ITL mean, ms  E2E mean, s    p99  hit rate  imbalance  answered  rejected  lost  E2E ratio  ratio   95 % interval  verdict
random                1.000  0.800  1.200  1.200          20.00  20.02         20.00        2.989  3.201    10.0 %       1.33     1,140         0    60          1      1               -  baseline
least-request         0.500  0.400  0.600  0.600          20.00  20.02         20.00        2.500  2.601    30.0 %       1.33     1,200         0     0      0.836  0.500  0.500 .. 0.500  better
Rejected or lost: random 0 rejected, 60 lost of 1,200 (5.0 %)
ratio: of the mean TTFT (E2E) to that of random, over the same requests"
    );
    assert_eq!(text.matches("ratio: of the mean").count(), 2, "one table for each cell");
}

#[test]
fn a_run_alone_is_compared_with_nothing() {
    let report = Report { runs: vec![run("random", "1.0", 50)], ..Report::default() };
    let text = table::render(&report.document(), TableStyle::default());
    assert!(!text.contains("ratio") && !text.contains("verdict"), "{text}");
    assert_eq!(table::render(&Report::default().document(), TableStyle::default()), "");
}

#[test]
fn verdicts_are_coloured_only_when_told() {
    let document = report().document();
    let coloured = table::render(&document, TableStyle { width: None, colour: true });
    assert!(coloured.contains("\x1b[32mbetter\x1b[0m"), "{coloured}");
    let plain = table::render(&document, TableStyle::default());
    assert!(!plain.contains('\x1b'));
    assert_eq!(coloured.replace("\x1b[32m", "").replace("\x1b[0m", ""), plain);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn tables_fit_the_terminal(width in 0usize..250, name in "[a-z-]{1,80}", colour in any::<bool>()) {
        let mut document = document_once().clone();
        document.runs.iter_mut().filter(|run| run.policy != "random").for_each(|run| run.policy.clone_from(&name));
        let text = table::render(&document, TableStyle { width: Some(width), colour });
        let text = ["\x1b[32m", "\x1b[31m", "\x1b[0m"].iter().fold(text, |text, code| text.replace(code, ""));
        let heads = ["chat", "ratio", "Rejected or lost"];
        let prose = |line: &&str| line.is_empty() || heads.iter().any(|head| line.starts_with(head));
        for line in text.lines().filter(|line| !prose(line)) {
            prop_assert!(line.chars().count() <= width.max(MIN_WIDTH), "{} columns: {}", width, line);
            prop_assert!(line.starts_with("policy") || line.contains("0.500") || line.contains("1.000"), "{}", line);
        }
    }
}

fn document_once() -> &'static Document {
    static DOCUMENT: std::sync::LazyLock<Document> = std::sync::LazyLock::new(|| report().document());
    &DOCUMENT
}

#[test]
fn the_file_beside_the_code_reads_like_this() {
    let mut document = document_once().clone();
    document.runs.iter_mut().filter(|run| run.policy == "random").for_each(|run| run.policy = "a|b".to_owned());
    document.baseline = "a|b".to_owned();
    let text = markdown::render(&document);
    let table = text.lines().skip(3).take(8).collect::<Vec<_>>().join("\n");
    assert_eq!(
        table,
        r"
Mean TTFT by that of a\|b:

| policy | chat \<1>, endpoints 2, speed 1.0 | chat \<1>, endpoints 2, speed 1.15 |
| --- | --: | --: |
| a\|b | 1 | 1 |
| least-request | **0.500** | **0.500** |
"
    );
    let wide = |line: &&str| line.starts_with("| ") && line.contains("baseline");
    let row = text.lines().find(wide).unwrap();
    assert_eq!(
        row,
        r"| a\|b | 1.000 | 0.800 | 1.200 | 1.200 | 20.00 | 20.02 | 20.00 | 2.989 | 3.201 | 10.0 % | 1.33 | 1,140 | 0 | 60 | 1 | 1 | - | baseline |"
    );
    for line in [
        "Mean TPOT by that of a\\|b:",
        "Mean end-to-end latency by that of a\\|b:",
        "| least-request | **0.836** | **0.836** |",
        "Rejected or lost: a\\|b 0 rejected, 60 lost of 1,200 (5.0 %).",
    ] {
        assert!(text.contains(line), "{line}: {text}");
    }
    let mut slower = document.clone();
    slower.runs.iter_mut().for_each(|run| run.took_seconds *= 2.0);
    assert_eq!(markdown::render(&slower), text, "the same command gives the same file");
}

/// Equal but for the last bit of numbers, which the reader may lose.
fn alike(a: &serde_json::Value, b: &serde_json::Value) -> bool {
    use serde_json::Value::{Array, Number, Object};
    match (a, b) {
        (Array(a), Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| alike(a, b)),
        (Object(a), Object(b)) => {
            a.len() == b.len() && a.iter().all(|(key, a)| b.get(key).is_some_and(|b| alike(a, b)))
        }
        (Number(a), Number(b)) if a != b => {
            let (a, b) = (a.as_f64().unwrap(), b.as_f64().unwrap());
            (a - b).abs() <= f64::EPSILON * a.abs()
        }
        _ => a == b,
    }
}

#[test]
fn json_has_all_figures_and_reads_back() {
    let document = document_once();
    let text = document.to_json().unwrap();
    let back: Document = serde_json::from_str(&text).unwrap();
    let (read, written) = (serde_json::to_value(&back).unwrap(), serde_json::to_value(document).unwrap());
    assert!(alike(&read, &written));
    let value: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(value["schema"], 1);
    assert_eq!(value["seed"], u64::MAX);
    let run = &value["runs"][1];
    for (field, want) in [
        ("/policy", serde_json::json!("least-request")),
        ("/cell/speed", serde_json::json!("1.0")),
        ("/decisions", serde_json::json!("feed000000000001")),
        ("/requests/answered", serde_json::json!(1_200)),
        ("/ttft_seconds/count", serde_json::json!(1_200)),
        ("/tpot_seconds/mean", serde_json::json!(0.02)),
        ("/itl_seconds/count", serde_json::json!(120_000)),
        ("/latency_seconds/mean", serde_json::json!(2.5)),
        ("/versus_baseline/unanswered", serde_json::json!(-60)),
        ("/versus_baseline/latency/verdict", serde_json::json!("better")),
        ("/tokens/foretold", serde_json::json!(480_000)),
        ("/hit_rate", serde_json::json!(0.3)),
        ("/goodput", serde_json::Value::Null),
        ("/gpu_seconds_saved", serde_json::json!(360.0)),
        ("/preemptions", serde_json::json!(1)),
        ("/endpoints/0/requests", serde_json::json!(800)),
        ("/versus_baseline/ttft/verdict", serde_json::json!("better")),
        ("/timeline/1/kv_usage/1", serde_json::json!(0.5)),
    ] {
        assert_eq!(run.pointer(field), Some(&want), "{field}");
    }
    assert_eq!(value["runs"][0]["versus_baseline"], serde_json::Value::Null, "the baseline itself");
    assert!((run["versus_baseline"]["ttft"]["ratio"].as_f64().unwrap() - 0.5).abs() < 1e-9);
    let quantiles = run["latency_seconds"]["quantiles"].as_array().unwrap();
    assert!(quantiles.windows(2).all(|q| q[0][0].as_f64() < q[1][0].as_f64() && q[0][1].as_f64() <= q[1][1].as_f64()));
    assert!((2..=512).contains(&run["timeline"].as_array().unwrap().len()));
}

#[test]
fn figures_are_written_short() {
    use number::{Unit, grouped_plain, seconds, three_digits, whole, write};
    for (value, text) in [
        (0.0, "0 s"),
        (0.000_000_5, "0.500 us"),
        (0.000_842, "842 us"),
        (0.0123, "12.3 ms"),
        (0.999_9, "1.00 s"),
        (1.236, "1.24 s"),
        (125.4, "125 s"),
        (36_000.0, "36,000 s"),
    ] {
        assert_eq!(seconds(value), text);
    }
    assert_eq!([three_digits(9_999.0), three_digits(-12_345.6), whole(1_234_567)], ["9999", "-12,346", "1,234,567"]);
    assert_eq!([grouped_plain(20_000.0), grouped_plain(0.25), grouped_plain(-3.0)], ["20,000", "0.25", "-3"]);
    assert_eq!([write(0.123, Unit::Share), write(12.0, Unit::PerSecond)], ["12.3 %", "12.0/s"]);
}

mod axes {
    use super::chart::{Axis, Bar, ChartMark, Curve, Ink, Plot, Scale, Scene, bars, range, width_of};
    use super::number::Unit;
    use proptest::prelude::*;

    /// Advance widths of DejaVu Sans and DejaVu Sans Bold, from the space to `~`, in 1/2048 of the size.
    const DEJAVU: [[u16; 95]; 2] = [
        [
            651, 821, 942, 1716, 1303, 1946, 1597, 563, 799, 799, 1024, 1716, 651, 739, 651, 690, 1303, 1303, 1303,
            1303, 1303, 1303, 1303, 1303, 1303, 1303, 690, 690, 1716, 1716, 1716, 1087, 2048, 1401, 1405, 1430, 1577,
            1294, 1178, 1587, 1540, 604, 604, 1343, 1141, 1767, 1532, 1612, 1235, 1612, 1423, 1300, 1251, 1499, 1401,
            2025, 1403, 1251, 1403, 799, 690, 799, 1716, 1024, 1024, 1255, 1300, 1126, 1300, 1260, 721, 1300, 1298,
            569, 569, 1186, 569, 1995, 1298, 1253, 1300, 1300, 842, 1067, 803, 1298, 1212, 1675, 1212, 1212, 1075,
            1303, 690, 1303, 1716,
        ],
        [
            713, 934, 1067, 1716, 1425, 2052, 1786, 627, 936, 936, 1071, 1716, 778, 850, 778, 748, 1425, 1425, 1425,
            1425, 1425, 1425, 1425, 1425, 1425, 1425, 819, 819, 1716, 1716, 1716, 1188, 2048, 1585, 1561, 1503, 1700,
            1399, 1399, 1681, 1714, 762, 762, 1587, 1305, 2038, 1714, 1741, 1501, 1741, 1577, 1475, 1397, 1663, 1585,
            2259, 1579, 1483, 1485, 936, 748, 936, 1716, 1024, 1024, 1382, 1466, 1214, 1466, 1389, 891, 1466, 1458,
            702, 702, 1362, 702, 2134, 1458, 1407, 1466, 1466, 1010, 1219, 979, 1458, 1335, 1892, 1321, 1335, 1192,
            1458, 748, 1458, 1716,
        ],
    ];

    #[test]
    fn words_are_given_the_width_of_the_widest_fonts() {
        for (bold, advances) in [(false, DEJAVU[0]), (true, DEJAVU[1])] {
            for (c, advance) in (' '..='~').zip(advances) {
                let (given, drawn) = (width_of(&c.to_string(), bold), f32::from(advance) * 12.0 / 2_048.0);
                assert!(given >= drawn, "`{c}`, bold {bold}: {given} pixels for {drawn}");
            }
        }
    }

    /// The first two words of a picture whose boxes overlap, or that are outside of it.
    fn overlap(scene: &Scene) -> Option<String> {
        let words: Vec<_> = scene.marks.iter().filter_map(|mark| Some((mark, mark.words_box()?))).collect();
        let outside = |[left, upper, right, lower]: [f32; 4]| {
            left < -0.01 || upper < 0.0 || right > scene.width + 0.01 || lower > scene.height
        };
        if let Some((mark, _)) = words.iter().find(|(_, at)| outside(*at)) {
            return Some(format!("outside: {mark:?}"));
        }
        let meet = |a: [f32; 4], b: [f32; 4]| a[0] < b[2] && b[0] < a[2] && a[1] < b[3] && b[1] < a[3];
        let all = words.iter().enumerate();
        let mut pairs = all.flat_map(|(i, a)| words.iter().skip(i + 1).map(move |b| (a, b)));
        pairs.find(|(a, b)| meet(a.1, b.1)).map(|(a, b)| format!("{:?} and {:?}", a.0, b.0))
    }

    #[test]
    fn words_of_short_ranges_of_times_do_not_overlap() {
        // From 50 ms to 900 ms, ticks of equal differences crowd on the right.
        for (low, high) in [(0.05, 0.9), (0.011, 0.09), (1e-6, 3_000.0), (0.5, 1.5), (900.0, 100_000.0)] {
            let x = Axis { name: "time to first token", unit: Unit::Seconds, scale: Scale::Log, range: (low, high) };
            let y = Axis { name: "requests within", unit: Unit::Share, scale: Scale::Linear, range: (0.0, 1.0) };
            let label = "a weighted sum of many parts:1,".repeat(4);
            let curve =
                Curve { label: label.clone(), ink: Ink::Series(0), width: 2.0, points: vec![(low, 0.0), (high, 1.0)] };
            let plot = Plot { title: label, x, y, curves: vec![curve; 9], size: (560.0, 300.0), legend: true };
            assert_eq!(overlap(&plot.draw()), None, "{low} to {high}");
        }
    }

    proptest! {
        #[test]
        fn words_of_bars_never_overlap(
            title in ".{0,120}", names in prop::collection::vec((".{0,80}", 0.0f64..1e15, "[0-9,]{0,30}"), 0..20),
            width in 370.0f32..800.0
        ) {
            let bar = |(label, value, words): &(String, f64, String)| Bar {
                label: label.clone(), value: *value, words: words.clone(), ink: Ink::Series(0),
            };
            let scene = bars(&title, &names.iter().map(bar).collect::<Vec<_>>(), width);
            prop_assert_eq!(overlap(&scene), None);
        }

        #[test]
        fn all_is_drawn_inside_the_picture(
            points in prop::collection::vec((-1e12f64..1e12, prop_oneof![Just(f64::NAN), -1e9f64..1e9]), 0..30),
            log in any::<bool>(), legend in any::<bool>(), names in prop::collection::vec(".{0,60}", 1..12),
            title in ".{0,90}"
        ) {
            let scale = if log { Scale::Log } else { Scale::Linear };
            let axis = |values: Vec<f64>| Axis { name: "axis", unit: Unit::Seconds, scale, range: range(values, scale) };
            let curve = |label: &String| Curve { label: label.clone(), ink: Ink::Series(9), width: 1.0, points: points.clone() };
            let plot = Plot {
                title: title.clone(),
                x: axis(points.iter().map(|p| p.0).collect()),
                y: axis(points.iter().map(|p| p.1).collect()),
                curves: names.iter().map(curve).collect(),
                size: (560.0, 300.0),
                legend,
            };
            let scene = plot.draw();
            let inside = |x: f32, y: f32| x >= 0.0 && x <= scene.width && y >= 0.0 && y <= scene.height;
            for mark in &scene.marks {
                match mark {
                    ChartMark::Line { strokes, .. } => prop_assert!(strokes.iter().flatten().all(|(x, y)| inside(*x, *y)), "{:?}", mark),
                    ChartMark::Words { x, y, .. } => prop_assert!(inside(*x, *y), "{:?}", mark),
                    ChartMark::Box { .. } => {}
                }
            }
            prop_assert!(scene.marks.len() < 200, "{} marks", scene.marks.len());
            prop_assert_eq!(overlap(&scene), None);
        }
    }
}

#[test]
fn waits_and_refusals_are_told_by_flow() {
    let mut report = report();
    let queued = |number: u64, tenant, waited, outcome| Queued {
        number,
        at: Timestamp(number),
        priority: if tenant == Some("shop") { 5 } else { 0 },
        tenant,
        waited: Duration::from_secs(waited),
        outcome,
    };
    let turns = [
        queued(0, Some("shop"), 1, QueueOutcome::Passed),
        queued(1, Some("shop"), 3, QueueOutcome::Passed),
        queued(2, Some("shop"), 9, QueueOutcome::Expired),
        queued(3, None, 0, QueueOutcome::Passed),
        queued(4, None, 0, QueueOutcome::Full),
        queued(5, None, 2, QueueOutcome::Evicted),
    ];
    turns.iter().for_each(|queued| report.runs[0].tally.queued(queued));
    let document = report.document();
    let queue = document.runs[0].queue.clone().unwrap();
    assert_eq!((queue.waited_seconds.count, queue.turns.turned_away(), queue.turns.longest_seconds), (3, 3, 3.0));
    assert!(document.runs[1].queue.is_none());
    let text = table::render(&document, TableStyle::default());
    for line in [
        "random, priority 5, shop: 2 had a turn after 2.00 s in the mean, 3.00 s at most; 1 turned away",
        "random, priority 0, no tenant: 1 had a turn after 0 s in the mean, 0 s at most; 2 turned away",
    ] {
        assert!(text.contains(line), "{text}");
    }
    let read: Document = serde_json::from_str(&document.to_json().unwrap()).unwrap();
    assert_eq!(read, document);
    // Those beyond the most are one.
    let mut many = Queueing::default();
    let names: Vec<String> = (0..150).map(|i| format!("tenant {i}")).collect();
    names.iter().for_each(|name| many.add(&queued(6, Some(name.as_str()), 1, QueueOutcome::Passed)));
    assert_eq!(many.flows().count(), queueing::MAX_FLOWS + 1);
    assert_eq!(many.flows().find(|flow| flow.1 == queueing::OTHERS).map(|flow| flow.2.passed), Some(50));
}

#[test]
fn a_policy_that_rejects_to_be_fast_is_neither_better_nor_lowest() {
    let mut report = report();
    report.runs.truncate(2);
    // The fast one rejects 200 requests.
    for number in 2_000..2_200 {
        report.runs[1].tally.add(&Served {
            number,
            pair: number,
            at: Timestamp(0),
            endpoint: None,
            prompt_tokens: 10,
            expected_cached_tokens: 0,
            cached_tokens: 0,
            generated_tokens: 0,
            first_token: None,
            total: Duration::ZERO,
            preemptions: 0,
            ending: Ending::Refused,
            handover: None,
            fell_back: false,
            turn: None,
            alone: None,
        });
    }
    let document = report.document();
    let versus = document.runs[1].versus_baseline.unwrap();
    assert_eq!(versus.unanswered, 140);
    for change in [versus.ttft, versus.latency] {
        let change = change.unwrap();
        assert!(change.ratio < 0.9 && change.verdict == compare::ComparisonVerdict::AnswersFewer, "{change:?}");
    }
    assert!(document.cells()[0].is_lowest(&document.runs[0]));
    let text = table::render(&document, TableStyle::default());
    assert!(text.contains("answers fewer"), "{text}");
    assert!(
        text.contains(
            "random 0 rejected, 60 lost of 1,200 (5.0 %); least-request 200 rejected, 0 lost of 1,400 (14.3 %)"
        ),
        "{text}"
    );
}
