//! The table of failures names tests that exist.

use std::path::Path;

#[test]
fn every_row_names_tests_that_exist() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    let read = |path: &Path| {
        std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
    };
    let table = read(&folder.join("README.md"));
    let mut rows = 0;
    for row in table.lines() {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let Some(Ok(number)) = cells.get(1).map(|n| n.parse::<usize>()) else {
            continue;
        };
        rows += 1;
        assert_eq!(number, rows);
        let mut named = 0;
        for entry in cells[3].split(';') {
            let (_, rest) = entry.split_once('`').expect("a file");
            let (file, names) = rest.split_once('`').expect("a file");
            let source = read(&folder.join(file));
            for name in names.split(',').map(str::trim).filter(|n| !n.is_empty()) {
                // Attributes of the test may stand between.
                let at = source.find(&format!("fn {name}()"));
                let before = &source[..at.unwrap_or_else(|| panic!("row {number}: no {name}"))];
                let last = before.rfind("fn ").unwrap_or(0);
                assert!(
                    before[last..].contains("#[test]") || before[last..].contains("proptest!"),
                    "row {number}: {name} is no test"
                );
                named += 1;
            }
        }
        assert!(named > 0 || cells[2].contains("GPU"), "row {number}");
    }
    assert_eq!(rows, 33);
}
