//! `loss.svg`: the loss on what is learnt from, on what is not, and what counting alone would get.

use std::ops::Range;
use std::path::Path;

use plotters::prelude::*;

use super::run_dir::write_whole;
use crate::failure::Failure;

/// What is drawn.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Curve {
    /// Above the picture.
    pub title: String,
    /// (step, loss) of each step.
    pub train: Vec<(u64, f64)>,
    /// (step, held-out loss) where it was taken.
    pub held_out: Vec<(u64, f64)>,
    /// Entropy of single tokens, as a line to be beaten.
    pub unigram_entropy: Option<f64>,
}

const TRAIN: RGBColor = RGBColor(70, 120, 190);
const HELD_OUT: RGBColor = RGBColor(214, 96, 38);
const REFERENCE: RGBColor = RGBColor(120, 120, 120);
const FONT: &str = "Helvetica, Arial, sans-serif";

impl Curve {
    /// Adds a step.
    pub fn add(&mut self, step: u64, loss: f64, held_out: Option<f64>) {
        self.train.push((step, loss));
        self.held_out.extend(held_out.map(|loss| (step, loss)));
    }

    /// Writes the picture; nothing where there is no finite loss to draw.
    ///
    /// # Errors
    /// Exit 3 where the file cannot be written.
    pub fn write(&self, path: &Path) -> Result<bool, Failure> {
        let Some(frame) = self.frame() else {
            return Ok(false);
        };
        let mut svg = String::new();
        self.draw(SVGBackend::with_string(&mut svg, (860, 480)), &frame)
            .map_err(|e| Failure::data(format!("{} cannot be drawn: {e}", path.display())))?;
        write_whole(path, svg.as_bytes())?;
        Ok(true)
    }

    /// Ranges of steps and losses that hold everything, with some air.
    fn frame(&self) -> Option<(Range<f64>, Range<f64>)> {
        let points = finite(&self.train).chain(finite(&self.held_out));
        let (mut last, mut low, mut high) = (1.0_f64, f64::INFINITY, f64::NEG_INFINITY);
        for (step, loss) in points {
            last = last.max(step);
            low = low.min(loss);
            high = high.max(loss);
        }
        if !(low.is_finite() && high.is_finite()) {
            return None;
        }
        if let Some(h) = self.reference() {
            low = low.min(h);
            high = high.max(h);
        }
        let air = ((high - low) * 0.06).max(high.abs() * 1e-3).max(1e-6);
        Some((0.0..last * 1.01, low - air..high + air))
    }

    fn reference(&self) -> Option<f64> {
        self.unigram_entropy.filter(|h| h.is_finite())
    }

    fn draw<'a>(
        &self,
        backend: SVGBackend<'a>,
        (steps, losses): &(Range<f64>, Range<f64>),
    ) -> Result<(), DrawingAreaErrorKind<<SVGBackend<'a> as DrawingBackend>::ErrorType>> {
        let area = backend.into_drawing_area();
        area.fill(&WHITE)?;
        let mut chart = ChartBuilder::on(&area)
            .caption(&self.title, (FONT, 17, &BLACK))
            .margin(14)
            .x_label_area_size(44)
            .y_label_area_size(58)
            .build_cartesian_2d(steps.clone(), losses.clone())?;
        let digits = if losses.end - losses.start < 0.5 {
            3
        } else {
            1
        };
        chart
            .configure_mesh()
            .x_desc("step")
            .y_desc("loss (nats per token)")
            .x_label_formatter(&|x| format!("{x:.0}"))
            .y_label_formatter(&|y| format!("{y:.digits$}"))
            .label_style((FONT, 13, &BLACK))
            .axis_desc_style((FONT, 14, &BLACK))
            .axis_style(BLACK.mix(0.5))
            .bold_line_style(BLACK.mix(0.10))
            .light_line_style(TRANSPARENT)
            .draw()?;
        if let Some(h) = self.reference() {
            let ends = [(steps.start, h), (steps.end, h)];
            chart
                .draw_series(DashedLineSeries::new(ends, 6, 5, REFERENCE.stroke_width(1)))?
                .label(format!("unigram entropy {h:.3}"))
                .legend(|(x, y)| PathElement::new([(x, y), (x + 18, y)], REFERENCE));
        }
        chart
            .draw_series(LineSeries::new(finite(&self.train), TRAIN.stroke_width(1)))?
            .label("training")
            .legend(|(x, y)| PathElement::new([(x, y), (x + 18, y)], TRAIN.stroke_width(2)));
        if let Some(&(_, loss)) = self.held_out.last() {
            chart
                .draw_series(LineSeries::new(
                    finite(&self.held_out),
                    HELD_OUT.stroke_width(2),
                ))?
                .label(format!("held out, last {loss:.3}"))
                .legend(|(x, y)| PathElement::new([(x, y), (x + 18, y)], HELD_OUT.stroke_width(2)));
            chart.draw_series(
                finite(&self.held_out).map(|p| Circle::new(p, 3, HELD_OUT.filled())),
            )?;
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperRight)
            .label_font((FONT, 13, &BLACK))
            .background_style(WHITE.mix(0.85))
            .border_style(BLACK.mix(0.15))
            .margin(10)
            .draw()?;
        area.present()
    }
}

fn finite(points: &[(u64, f64)]) -> impl Iterator<Item = (f64, f64)> + '_ {
    points
        .iter()
        .filter(|(_, loss)| loss.is_finite())
        .map(|&(step, loss)| (step as f64, loss))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::test_dir::TestDir;

    #[test]
    fn draws_what_there_is() {
        let dir = TestDir::new("curve");
        let path = dir.path().join("loss.svg");
        let full = Curve {
            title: "tiny <&> 8 ranks".into(),
            train: (1..=300)
                .map(|s| (s, 1.8 + 3.7 * (-(s as f64) / 60.0).exp()))
                .collect(),
            held_out: (1..=6).map(|s| (50 * s, 2.0 + 1.0 / s as f64)).collect(),
            unigram_entropy: Some(3.3),
        };
        assert!(full.write(&path).unwrap());
        let svg = std::fs::read_to_string(&path).unwrap();
        for words in [
            "<svg",
            "step",
            "nats per token",
            "held out, last",
            "unigram entropy 3.300",
            "&lt;&amp;&gt;",
        ] {
            assert!(svg.contains(words), "{words}");
        }
        let short = [
            Curve {
                train: vec![(1, 2.0)],
                ..Curve::default()
            },
            Curve {
                train: vec![(1, 2.0), (2, f64::NAN), (3, 1e300)],
                ..Curve::default()
            },
            Curve {
                held_out: vec![(5, 0.0)],
                unigram_entropy: Some(f64::NAN),
                ..Curve::default()
            },
        ];
        for curve in short {
            assert!(curve.write(&path).unwrap(), "{curve:?}");
        }
        let none = Curve {
            train: vec![(1, f64::NAN)],
            ..Curve::default()
        };
        assert!(!none.write(&path).unwrap());
        assert!(!Curve::default().write(&path).unwrap());
    }
}
