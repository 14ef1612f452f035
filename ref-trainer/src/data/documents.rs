//! Documents of a text: what lies between blank lines.
//!
//! ```text
//! text       a b \n \n c \n d \n \n \n e      a document begins where text goes on after a
//! document   0 0 0  0  1 1  1 1  1  1  2      blank line; the line itself ends the one before
//! ```
//!
//! Where one begins is a function of the text and the place alone, so any rank knows it.

use std::ops::Range;

/// The documents of the bytes in `window`, counted from that of the first.
pub(super) fn documents(text: &[u8], window: Range<usize>) -> Vec<i32> {
    let mut breaks = breaks_before(text, window.start);
    let mut document = 0;
    let first = window.start;
    let number = |at: usize| {
        match text[at] {
            b'\n' => breaks += 1,
            b'\r' => {}
            _ => {
                document += i32::from(breaks >= 2 && at > first);
                breaks = 0;
            }
        }
        document
    };
    window.map(number).collect()
}

/// Does a document begin at this byte?
pub(super) fn begins(text: &[u8], at: usize) -> bool {
    !matches!(text.get(at), None | Some(b'\n' | b'\r')) && breaks_before(text, at) >= 2
}

/// Line ends right before this byte, as far as they matter: up to two.
fn breaks_before(text: &[u8], at: usize) -> usize {
    let before = text[..at].iter().rev();
    let ends = before.take_while(|byte| matches!(byte, b'\n' | b'\r'));
    ends.filter(|byte| **byte == b'\n').take(2).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blank_lines_part() {
        let of = |text: &str| documents(text.as_bytes(), 0..text.len());
        assert_eq!(of("ab\n\nc\nd\n\n\ne"), [0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 2]);
        assert_eq!(of("a\r\n\r\nb"), [0, 0, 0, 0, 0, 1]);
        assert_eq!(of("\n\n\n"), [0, 0, 0]);
        assert_eq!(of(""), [] as [i32; 0]);
    }

    /// A window sees borders where the whole text has them.
    #[test]
    fn a_window_has_the_borders_of_the_text() {
        let text: Vec<u8> = (0..300_usize)
            .map(|i| b"x\n\n\r"[(i * i / 3 + i / 7) % 4])
            .collect();
        let whole = documents(&text, 0..text.len());
        assert!(whole.last() > Some(&20));
        for first in 0..text.len() {
            let window = documents(&text, first..text.len());
            for (i, pair) in window.windows(2).enumerate() {
                let border = pair[1] - pair[0];
                assert_eq!(border, whole[first + i + 1] - whole[first + i]);
                assert_eq!(border == 1, begins(&text, first + i + 1));
            }
        }
        assert!(!begins(&text, text.len()));
    }
}
