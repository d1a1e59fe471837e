//! Pictures of a training.

use std::fmt::Display;
use std::path::Path;
use std::sync::Once;

use plotters::prelude::*;
use plotters::style::register_font;

use super::Error;
use super::evaluate::Evaluation;

/// A font of our own: the machine may have none.
fn fonts() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // Fails only for a damaged font.
        let _ = register_font("sans-serif", FontStyle::Normal, dejavu::sans::regular());
    });
}

fn at<E: Display>(path: &Path) -> impl Fn(E) -> Error {
    move |cause| Error::Plot { path: path.to_owned(), cause: cause.to_string() }
}

/// The least and the largest of `values`, a little apart where they are equal.
fn range(values: impl Iterator<Item = f64>) -> std::ops::Range<f64> {
    let (low, high) = values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| (low.min(v), high.max(v)));
    let margin = ((high - low) * 0.05).max(1e-6);
    low - margin..high + margin
}

/// The loss of every step and its mean over epochs, on a logarithmic axis.
///
/// # Errors
/// [`Error::Plot`].
pub fn losses(path: &Path, losses: &[f32], steps_per_epoch: usize) -> Result<(), Error> {
    fonts();
    let per_epoch = steps_per_epoch.max(1);
    // A logarithm needs positive values.
    let points = |i: usize, loss: f64| (i as f64 / per_epoch as f64, loss.max(1e-9));
    let steps: Vec<_> = losses.iter().enumerate().map(|(i, loss)| points(i + 1, f64::from(*loss))).collect();
    let mean = |chunk: &[f32]| chunk.iter().map(|l| f64::from(*l)).sum::<f64>() / chunk.len() as f64;
    let means: Vec<_> = losses.chunks(per_epoch).enumerate().map(|(i, chunk)| points(i * per_epoch + chunk.len(), mean(chunk))).collect();
    let (low, high) = steps.iter().fold((f64::INFINITY, 1e-9), |(low, high), (_, l)| (l.min(low), l.max(high)));
    let end = steps.last().map_or(1.0, |(x, _)| *x);

    let root = BitMapBackend::new(path, (900, 600)).into_drawing_area();
    root.fill(&WHITE).map_err(at(path))?;
    let mut chart = ChartBuilder::on(&root)
        .caption("Training loss", ("sans-serif", 26))
        .margin(16)
        .x_label_area_size(44)
        .y_label_area_size(70)
        .build_cartesian_2d(0.0..end, (low.min(high) / 1.2..high * 1.2).log_scale())
        .map_err(at(path))?;
    chart
        .configure_mesh()
        .x_desc("epochs")
        .y_desc("mean square error")
        .y_label_formatter(&|v| format!("{v:.0e}"))
        .label_style(("sans-serif", 16))
        .draw()
        .map_err(at(path))?;
    let light = RGBColor(150, 180, 220);
    let legend = |color: RGBColor| move |(x, y)| PathElement::new([(x, y), (x + 20, y)], color.stroke_width(2));
    chart.draw_series(LineSeries::new(steps, light)).map_err(at(path))?.label("step").legend(legend(light));
    chart.draw_series(LineSeries::new(means, BLUE.stroke_width(3))).map_err(at(path))?.label("mean of the epoch").legend(legend(BLUE));
    let labels = chart.configure_series_labels().background_style(WHITE).border_style(BLACK).label_font(("sans-serif", 16)).draw();
    labels.map_err(at(path))?;
    root.present().map_err(at(path))
}

/// Predicted against true, a panel a parameter, with the line of perfect prediction.
///
/// # Errors
/// [`Error::Plot`].
pub fn predicted(path: &Path, test: &Evaluation) -> Result<(), Error> {
    fonts();
    let panels = test.names.len();
    let columns = panels.clamp(1, 2);
    let rows = panels.div_ceil(columns).max(1);
    let root = BitMapBackend::new(path, (480 * columns as u32, 480 * rows as u32)).into_drawing_area();
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
    fn pictures_are_drawn_from_any_numbers() {
        let folder = tempfile::tempdir().unwrap();
        for (i, values) in [vec![0.5f32; 7], vec![1.0], vec![0.3, 0.0, 0.2, 0.01]].iter().enumerate() {
            let path = folder.path().join(format!("loss{i}.png"));
            losses(&path, values, 3).unwrap();
            assert!(is_png(&path), "{values:?}");
        }
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
