use super::*;
use crate::report::Losses;

fn report(step: u64) -> StepReport {
    StepReport {
        step,
        loss: 3.0 / step as f64,
        step_ms: 12.345_678,
        ..StepReport::default()
    }
}

/// The numbers that a page holds.
fn numbers(page: &str) -> Value {
    let (_, rest) = page.split_once("id=\"data\">").unwrap();
    serde_json::from_str(rest.split_once("</script>").unwrap().0).unwrap()
}

#[test]
fn what_is_put_in_is_not_looked_at_again() {
    let parts = [("A", "@B@"), ("B", "b")];
    assert_eq!(filled("x@A@y@B@z@C@", &parts), "x@B@ybzC");
    assert_eq!(
        escaped("<a href=\"&\">"),
        "&lt;a href=&quot;&amp;&quot;&gt;"
    );
}

#[test]
fn a_page_holds_its_numbers_and_loads_nothing() {
    let job = Job::demo();
    let forecast = Forecast {
        data: "a </script><script>alert(1)</script> text".into(),
        ..Forecast::default()
    };
    let mut history = History::default();
    (1..=3).for_each(|step| history.add(&report(step)));
    let mut seen = vec![Seen::default(); 16];
    seen[3].sent.entry("tp".into()).or_default().insert(2, 40);
    seen[3].memory[0] = 7;
    let proof = EqualityTable {
        losses: vec![Losses {
            step: 1,
            ours: 3.0,
            twin: 3.0,
            oracle: 2.0,
        }],
        ..EqualityTable::default()
    };
    let page = page(&job, &forecast, &history, (&seen, 2), Some(&proof)).unwrap();
    assert_eq!(page.matches("<script").count(), 2);
    for outside in ["http:", "https:", "src=", "@import", "url("] {
        let found = page
            .replace("http://www.w3.org/2000/svg", "")
            .contains(outside);
        assert!(!found, "{outside}");
    }
    let data = numbers(&page);
    assert_eq!(data["steps"].as_array().unwrap().len(), 3);
    assert_eq!(data["steps"][0]["step_ms"], 12.3457);
    assert_eq!(data["places"][3], "pp 0 dp 0 cp 1 tp 1 ep 3");
    let traffic = &data["traffic"];
    let tp = traffic["groups"]
        .as_array()
        .unwrap()
        .iter()
        .position(|g| g == "tp");
    assert_eq!(traffic["cells"], serde_json::json!([[tp, 3, 2, 40]]));
    // Predicted of two steps, as the planner has them of one.
    let planned = predicted_ranks(&job).unwrap()[3]["tp"] * 2;
    assert_eq!(traffic["predicted"][3][tp.unwrap()], planned);
    assert_eq!(data["memory"]["counted"][3][0], 7);
    let planned = predicted_memory(&job).unwrap()[3]["parameters"].peak;
    assert_eq!(data["memory"]["predicted"][3][0], planned);
    assert_eq!(data["proof"]["losses"][0]["oracle"], 2.0);
    assert_eq!(data["proof"]["holds"], true);
    assert_eq!(
        (&data["timeline"], &data["experts"]),
        (&Value::Null, &Value::Null)
    );
}

/// A run that failed at once, on one rank, still has a page.
#[test]
fn a_run_without_a_step_has_a_page() {
    let (job, none) = (Job::default(), History::default());
    let page = page(&job, &Forecast::default(), &none, (&[], 0), None).unwrap();
    let data = numbers(&page);
    assert_eq!(data["places"], serde_json::json!([""]));
    assert!(data["memory"].is_null() && data["proof"].is_null());
}
