//! Pictures of predictions.

use std::path::Path;

use plotters::prelude::*;

use super::evaluate::Evaluation;
use crate::common::Error;
use crate::common::plot::{at, fonts, whole};

/// The least and the largest of `values`, a little apart where they are equal.
fn range(values: impl Iterator<Item = f64>) -> std::ops::Range<f64> {
    let (low, high) = values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| (low.min(v), high.max(v)));
    let margin = ((high - low) * 0.05).max(1e-6);
    low - margin..high + margin
}

/// Predicted against true, a panel a parameter, with the line of perfect prediction.
///
/// # Errors
/// [`Error::Plot`].
pub fn predicted(path: &Path, test: &Evaluation) -> Result<(), Error> {
    whole(path, |partial| draw(path, partial, test))
}

/// Draws the file `partial`; errors name `path`.
fn draw(path: &Path, partial: &Path, test: &Evaluation) -> Result<(), Error> {
    fonts();
    let panels = test.names.len();
    let columns = panels.clamp(1, 2);
    let rows = panels.div_ceil(columns).max(1);
    let root = BitMapBackend::new(partial, (480 * columns as u32, 480 * rows as u32)).into_drawing_area();
    root.fill(&WHITE).map_err(at(path))?;
    let (own, constant) = (test.mse(), test.constant_mse());
    for (c, (area, name)) in root.split_evenly((rows, columns)).iter().zip(&test.names).enumerate() {
        let points: Vec<_> = test.truth.iter().zip(&test.predicted).map(|(t, p)| (f64::from(t[c]), f64::from(p[c]))).collect();
        let both = range(points.iter().flat_map(|(t, p)| [*t, *p]));
        let mut chart = ChartBuilder::on(area)
            .caption(format!("{name}: error {:.4}, constant {:.4}", own[c], constant[c]), ("sans-serif", 20))
            .margin(14)
            .x_label_area_size(40)
            .y_label_area_size(56)
            .build_cartesian_2d(both.clone(), both.clone())
            .map_err(at(path))?;
        let mut mesh = chart.configure_mesh();
        mesh.x_desc("true (unit range)").y_desc("predicted").label_style(("sans-serif", 15)).draw().map_err(at(path))?;
        let diagonal = [(both.start, both.start), (both.end, both.end)];
        chart.draw_series(LineSeries::new(diagonal, BLACK.mix(0.5))).map_err(at(path))?;
        chart.draw_series(points.iter().map(|p| Circle::new(*p, 4, BLUE.filled()))).map_err(at(path))?;
    }
    root.present().map_err(at(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_png(path: &Path) -> bool {
        std::fs::read(path).is_ok_and(|bytes| bytes.starts_with(b"\x89PNG") && bytes.len() > 4000)
    }

    #[test]
    fn predictions_are_drawn() {
        let folder = tempfile::tempdir().unwrap();
        let test = Evaluation {
            names: ["a", "b", "c"].map(String::from).into(),
            means: vec![0.0; 3],
            predicted: vec![vec![0.1, 0.2, 0.3], vec![0.1, 0.5, -1.0]],
            truth: vec![vec![0.1, 0.3, 0.3], vec![0.1, 0.4, 0.9]],
        };
        let path = folder.path().join("predicted.png");
        predicted(&path, &test).unwrap();
        assert!(is_png(&path));
        let message = predicted(Path::new("/nonexistent/x.png"), &test).unwrap_err().to_string();
        assert!(message.starts_with("/nonexistent/x.png: "), "{message}");
    }
}
