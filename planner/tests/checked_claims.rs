//! `docs/checked-claims.md` says what the planner says: each row's figure is worked out again.

#[path = "../examples/02_checked_claims.rs"]
mod example;

/// Rows of the page: name and figure.
fn rows(page: &str) -> Vec<(&str, &str)> {
    let lines = page.lines().filter(|line| line.starts_with("| `"));
    let cells = lines.map(|line| line.split('|').map(str::trim).collect::<Vec<_>>());
    cells
        .map(|cells| (cells[1].trim_matches('`'), cells[3]))
        .collect()
}

#[test]
fn every_figure_on_the_page_is_the_planners() {
    let page = include_str!("../../docs/checked-claims.md");
    let (rows, claims) = (rows(page), example::claims().unwrap());
    let names: Vec<&str> = rows.iter().map(|(name, _)| *name).collect();
    let worked: Vec<&str> = claims.iter().map(|(name, _)| *name).collect();
    assert_eq!(names, worked, "one row for each claim, in their order");
    for ((name, shown), (_, figure)) in rows.iter().zip(&claims) {
        assert_eq!(shown, figure, "{name}");
    }
}

#[test]
fn the_page_corrects_what_is_wrong() {
    let page = include_str!("../../docs/checked-claims.md");
    for corrected in [
        "states-70b",
        "zero-volume-accumulated",
        "ep-folds",
        "sequence-parallel",
        "deepspeed-zero-2",
    ] {
        let line = page
            .lines()
            .find(|line| line.contains(&format!("`{corrected}`")));
        assert!(
            line.is_some_and(|line| line.contains("corrected")),
            "{corrected}"
        );
    }
}
