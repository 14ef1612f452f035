use super::*;
use crate::report::timeline::tests::{message, recording, span};
use quintet_parallel_layers::pipeline::Action;

fn parsed(text: &str) -> Vec<Value> {
    let object: Value = serde_json::from_str(text).unwrap();
    object["traceEvents"].as_array().unwrap().clone()
}

/// Two ranks, one message between them: every event, as a person reads it.
#[test]
fn a_small_trace_is_this() {
    let first = recording(vec![
        span(What::Step(2), 1_000, 9_000),
        span(
            What::Action(Action::Forward { mb: 1, chunk: 0 }),
            2_000,
            5_000,
        ),
        span(message("send", 1, 7), 5_500, 6_000),
    ]);
    let second = recording(vec![span(message("recv", 0, 7), 3_000, 8_000)]);
    let ranks = [
        RankName {
            place: "pp 0".into(),
            first_microbatch: 4,
        },
        RankName {
            place: "pp 1".into(),
            first_microbatch: 4,
        },
    ];
    let text = chrome(
        &Timeline::new(&[first, second]),
        &ranks,
        &[("model", "tiny".into())],
    )
    .unwrap();
    let want = r#"{"displayTimeUnit":"ms","otherData":{"model":"tiny"},"traceEvents":[
{"name":"process_name","ph":"M","pid":0,"tid":0,"args":{"name":"rank 0: pp 0"}},
{"name":"process_sort_index","ph":"M","pid":0,"tid":0,"args":{"sort_index":0}},
{"name":"thread_name","ph":"M","pid":0,"tid":0,"args":{"name":"compute"}},
{"name":"thread_sort_index","ph":"M","pid":0,"tid":0,"args":{"sort_index":0}},
{"name":"thread_name","ph":"M","pid":0,"tid":1,"args":{"name":"communication"}},
{"name":"thread_sort_index","ph":"M","pid":0,"tid":1,"args":{"sort_index":1}},
{"name":"step 2","cat":"step","ph":"X","pid":0,"tid":0,"ts":0.0,"dur":8.0},
{"name":"F mb5","cat":"forward","ph":"X","pid":0,"tid":0,"ts":1.0,"dur":3.0},
{"name":"send pp -> 1, 64 B","cat":"message","ph":"X","pid":0,"tid":1,"ts":4.5,"dur":0.5,"args":{"bytes":64,"group":"pp","peer":1,"started":true,"tag":7}},
{"name":"process_name","ph":"M","pid":1,"tid":0,"args":{"name":"rank 1: pp 1"}},
{"name":"process_sort_index","ph":"M","pid":1,"tid":0,"args":{"sort_index":1}},
{"name":"thread_name","ph":"M","pid":1,"tid":0,"args":{"name":"compute"}},
{"name":"thread_sort_index","ph":"M","pid":1,"tid":0,"args":{"sort_index":0}},
{"name":"thread_name","ph":"M","pid":1,"tid":1,"args":{"name":"communication"}},
{"name":"thread_sort_index","ph":"M","pid":1,"tid":1,"args":{"sort_index":1}},
{"name":"recv pp <- 0","cat":"message","ph":"X","pid":1,"tid":1,"ts":2.0,"dur":5.0,"args":{"bytes":0,"group":"pp","peer":0,"started":true,"tag":7}},
{"name":"message of pp","cat":"message","ph":"s","pid":0,"tid":1,"ts":4.5,"id":0},
{"name":"message of pp","cat":"message","ph":"f","pid":1,"tid":1,"ts":6.999,"id":0,"bp":"e"}
]}
"#;
    assert_eq!(text, want);
}

/// What a reader cannot know is left out, and hostile names stay within their strings.
#[test]
fn nothing_recorded_and_strange_names_are_still_a_trace() {
    assert!(parsed(&chrome(&Timeline::new(&[]), &[], &[]).unwrap()).is_empty());
    let strange = "a\"b\\c</script>\n\u{1f}é".to_string();
    let rank = RankName {
        place: strange.clone(),
        first_microbatch: 0,
    };
    let text = chrome(
        &Timeline::new(&[recording(vec![])]),
        &[rank],
        &[("model", strange)],
    );
    assert_eq!(parsed(&text.unwrap()).len(), 4);
}
