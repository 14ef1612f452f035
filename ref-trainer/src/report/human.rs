//! Numbers as people read them.

use std::collections::BTreeMap;

/// `12,345,678`.
#[must_use]
pub fn thousands(n: u64) -> String {
    let digits = n.to_string();
    let mut text = String::with_capacity(digits.len() * 4 / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// `950 B`, `14.2 kB`, `3.1 MB`: powers of 1000, three digits.
#[must_use]
pub fn bytes(n: u64) -> String {
    scaled(n, " ", &["B", "kB", "MB", "GB", "TB", "PB", "EB"])
}

/// `812`, `14.2k`, `3.1M`, `7.2B`.
#[must_use]
pub fn count(n: u64) -> String {
    scaled(n, "", &["", "k", "M", "B", "T"])
}

/// `parameters 0.4 MB, gradients 0.4 MB`, largest first, zeros left out.
#[must_use]
pub fn shares(parts: &BTreeMap<String, u64>) -> String {
    let mut parts: Vec<(&String, u64)> = parts.iter().map(|(name, n)| (name, *n)).collect();
    parts.retain(|(_, n)| *n > 0);
    parts.sort_by_key(|&(_, n)| std::cmp::Reverse(n));
    let words: Vec<String> = parts
        .iter()
        .map(|(name, n)| format!("{name} {}", bytes(*n)))
        .collect();
    words.join(", ")
}

/// `57 %` of a fraction; `-` of what is no number.
#[must_use]
pub fn percent(fraction: f64) -> String {
    if fraction.is_finite() {
        format!("{:.0}%", 100.0 * fraction)
    } else {
        "-".into()
    }
}

/// `2026-01-31 12:00:00` of seconds since 1970, in UTC.
#[must_use]
pub fn utc(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    // Howard Hinnant's civil_from_days: years begin in March, eras are 400 years.
    let days = days + 719_468;
    let (era, of_era) = (days / 146_097, days % 146_097);
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let from_march = (5 * of_year + 2) / 153;
    let day = of_year - (153 * from_march + 2) / 5 + 1;
    let month = (from_march + 2) % 12 + 1;
    let year = year + era * 400 + u64::from(month <= 2);
    let (hour, minute, second) = (rest / 3600, rest / 60 % 60, rest % 60);
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02}")
}

fn scaled(n: u64, gap: &str, units: &[&str]) -> String {
    let mut value = n as f64;
    let mut unit = 0;
    // 999.95 would be printed as 1000.0.
    while value >= 999.5 && unit + 1 < units.len() {
        value /= 1000.0;
        unit += 1;
    }
    let digits = usize::from(unit > 0 && value < 99.95);
    format!("{value:.digits$}{gap}{}", units[unit])
        .trim_end()
        .to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_gregorian() {
        for (seconds, want) in [
            (0, "1970-01-01 00:00:00"),
            (951_782_399, "2000-02-28 23:59:59"),
            (951_782_400, "2000-02-29 00:00:00"),
            (951_868_800, "2000-03-01 00:00:00"),
            (4_107_542_399, "2100-02-28 23:59:59"),
            (4_107_542_400, "2100-03-01 00:00:00"),
            (1_735_689_599, "2024-12-31 23:59:59"),
        ] {
            assert_eq!(utc(seconds), want);
        }
    }

    #[test]
    fn printed() {
        assert_eq!(
            [0, 999, 1000, 812_032].map(thousands),
            ["0", "999", "1,000", "812,032"]
        );
        assert_eq!(thousands(u64::MAX), "18,446,744,073,709,551,615");
        assert_eq!(
            [0, 950, 999, 1000, 14_230, 999_960, 3_100_000].map(bytes),
            [
                "0 B", "950 B", "999 B", "1.0 kB", "14.2 kB", "1.0 MB", "3.1 MB"
            ]
        );
        assert_eq!(bytes(u64::MAX), "18.4 EB");
        assert_eq!(
            [812, 203_456, 7_200_000_000].map(count),
            ["812", "203k", "7.2B"]
        );
        let parts = [("a", 1), ("b", 0), ("c", 2_000)]
            .map(|(k, v)| (k.to_string(), v))
            .into();
        assert_eq!(shares(&parts), "c 2.0 kB, a 1 B");
        assert_eq!([0.114, 1.0, f64::NAN].map(percent), ["11%", "100%", "-"]);
    }
}
