//! Pictures of a training.

use std::fmt::Display;
use std::path::Path;
use std::sync::Once;

use burn_spatial_io::whole_file_as;
use plotters::prelude::*;
use plotters::style::register_font;

use super::Error;

/// Makes a font of our own known: the machine may have none.
pub fn fonts() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // Fails only for a damaged font.
        let _ = register_font("sans-serif", FontStyle::Normal, dejavu::sans::regular());
    });
}

/// For `map_err` on what draws `path`.
pub fn at<E: Display>(path: &Path) -> impl Fn(E) -> Error {
    move |cause| Error::Plot { path: path.to_owned(), cause: cause.to_string() }
}

/// Lets `draw` draw the picture `path`, beside it first.
///
/// # Errors
/// Those of `draw`, and [`Error::Io`].
pub fn whole(path: &Path, draw: impl FnOnce(&Path) -> Result<(), Error>) -> Result<(), Error> {
    // The end of the name says the format.
    whole_file_as(&path.with_extension("partial.png"), path, draw, Error::io(path))
}

/// A number on an axis, short.
fn label(value: f64) -> String {
    if value < 1e-3 {
        return format!("{value:.0e}");
    }
    format!("{value:.4}").trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// The loss of every step, which is called `what`, and its mean over epochs, on a logarithmic axis.
///
/// # Errors
/// [`Error::Plot`].
pub fn losses(path: &Path, losses: &[f32], steps_per_epoch: usize, what: &str) -> Result<(), Error> {
    whole(path, |partial| draw_losses(path, partial, losses, steps_per_epoch, what))
}

/// Draws the losses as the file `partial`; errors name `path`.
fn draw_losses(path: &Path, partial: &Path, losses: &[f32], steps_per_epoch: usize, what: &str) -> Result<(), Error> {
    fonts();
    let per_epoch = steps_per_epoch.max(1);
    // A logarithm needs positive values.
    let points = |i: usize, loss: f64| (i as f64 / per_epoch as f64, loss.max(1e-9));
    let steps: Vec<_> = losses.iter().enumerate().map(|(i, loss)| points(i + 1, f64::from(*loss))).collect();
    let mean = |chunk: &[f32]| chunk.iter().map(|l| f64::from(*l)).sum::<f64>() / chunk.len() as f64;
    let means: Vec<_> = losses.chunks(per_epoch).enumerate().map(|(i, chunk)| points(i * per_epoch + chunk.len(), mean(chunk))).collect();
    let (low, high) = steps.iter().fold((f64::INFINITY, 1e-9), |(low, high), (_, l)| (l.min(low), l.max(high)));
    let end = steps.last().map_or(1.0, |(x, _)| *x);
    // Labels are at powers of the base: a narrow range needs closer ones.
    let base = if high / low.min(high) < 30.0 { 2.0 } else { 10.0 };

    let root = BitMapBackend::new(partial, (900, 600)).into_drawing_area();
    root.fill(&WHITE).map_err(at(path))?;
    let mut chart = ChartBuilder::on(&root)
        .caption("Training loss", ("sans-serif", 26))
        .margin(16)
        .x_label_area_size(44)
        .y_label_area_size(70)
        .build_cartesian_2d(0.0..end, (low.min(high) / 1.2..high * 1.2).log_scale().base(base))
        .map_err(at(path))?;
    chart
        .configure_mesh()
        .x_desc("epochs")
        .y_desc(what)
        .y_label_formatter(&|v| label(*v))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_short() {
        assert_eq!([1.0, 0.25, 10.0, 0.010000000000000002, 1e-4].map(label), ["1", "0.25", "10", "0.01", "1e-4"]);
    }

    #[test]
    fn losses_are_drawn_whatever_they_are() {
        let folder = tempfile::tempdir().unwrap();
        for (i, values) in [vec![0.5f32; 7], vec![1.0], vec![0.3, 0.0, 0.2, 0.01]].iter().enumerate() {
            let path = folder.path().join(format!("loss{i}.png"));
            losses(&path, values, 3, "loss").unwrap();
            assert!(std::fs::read(&path).is_ok_and(|bytes| bytes.starts_with(b"\x89PNG") && bytes.len() > 4000), "{values:?}");
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 3, "nothing is left beside them");
    }
}
