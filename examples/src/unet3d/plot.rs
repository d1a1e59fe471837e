//! Pictures of predictions.

use std::path::Path;

use plotters::coord::Shift;
use plotters::prelude::*;

use crate::common::Error;
use crate::common::plot::{at, fonts, whole};

/// Edge of a panel, in pixels.
const PANEL: u32 = 360;
/// Height of a title.
const TITLE: u32 = 30;
const MARGIN: u32 = 8;
/// How much of a class's color covers the image.
const COVER: f64 = 0.5;

/// A slice of a volume with the class of each voxel, row-major.
#[derive(Clone, Debug, PartialEq)]
pub struct Slice {
    /// Where it is.
    pub title: String,
    /// Voxels downwards.
    pub rows: usize,
    /// Voxels to the right.
    pub columns: usize,
    /// Brightness.
    pub values: Vec<f32>,
    /// Classes.
    pub classes: Vec<i64>,
}

/// The color of a class; class 0, the background, has none.
fn color(class: i64) -> Option<RGBColor> {
    (class > 0).then(|| {
        let (r, g, b) = Palette99::pick(class as usize - 1).to_backend_color().rgb;
        RGBColor(r, g, b)
    })
}

/// Draws `slices`: above as they are, below with the classes over them.
///
/// # Errors
/// [`Error::Plot`].
pub fn segmentation(path: &Path, slices: &[Slice], classes: usize) -> Result<(), Error> {
    whole(path, |partial| draw_slices(path, partial, slices, classes))
}

/// Draws the file `partial`; errors name `path`.
fn draw_slices(path: &Path, partial: &Path, slices: &[Slice], classes: usize) -> Result<(), Error> {
    fonts();
    let size = (slices.len().max(1) as u32 * (PANEL + MARGIN) + MARGIN, 2 * (PANEL + TITLE + MARGIN) + TITLE);
    let root = BitMapBackend::new(partial, size).into_drawing_area();
    root.fill(&WHITE).map_err(at(path))?;
    let text = |title: &str, x: u32, y: u32| Text::new(title.to_owned(), (x as i32, y as i32), ("sans-serif", 18).into_font());
    for (column, slice) in slices.iter().enumerate() {
        let x = MARGIN + column as u32 * (PANEL + MARGIN);
        for (row, with) in [false, true].into_iter().enumerate() {
            let y = row as u32 * (PANEL + TITLE + MARGIN);
            let title = if with { format!("{}, classes", slice.title) } else { slice.title.clone() };
            root.draw(&text(&title, x, y + 8)).map_err(at(path))?;
            draw(&root, slice, with, (x, y + TITLE)).map_err(at(path))?;
        }
    }
    // What the colors mean.
    let y = size.1 - TITLE + 4;
    for class in 1..classes.min(12) {
        let x = (MARGIN + (class as u32 - 1) * 90) as i32;
        if let Some(color) = color(class as i64) {
            root.draw(&Rectangle::new([(x, y as i32), (x + 14, y as i32 + 14)], color.filled())).map_err(at(path))?;
        }
        root.draw(&text(&format!("class {class}"), x as u32 + 20, y)).map_err(at(path))?;
    }
    root.present().map_err(at(path))
}

type Area<'a> = DrawingArea<BitMapBackend<'a>, Shift>;
type AreaError<'a> = DrawingAreaErrorKind<<BitMapBackend<'a> as DrawingBackend>::ErrorType>;

/// One panel with its corner at `corner`, as large as fits, voxel for voxel.
fn draw<'a>(area: &Area<'a>, slice: &Slice, with_classes: bool, corner: (u32, u32)) -> Result<(), AreaError<'a>> {
    let (low, high) = slice.values.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(low, high), v| (low.min(*v), high.max(*v)));
    let scale = f64::from(PANEL) / slice.rows.max(slice.columns).max(1) as f64;
    let [height, width] = [slice.rows, slice.columns].map(|n| (n as f64 * scale) as u32);
    for y in 0..height {
        for x in 0..width {
            let voxel = |pixel: u32, n: usize| ((f64::from(pixel) / scale) as usize).min(n - 1);
            let i = voxel(y, slice.rows) * slice.columns + voxel(x, slice.columns);
            let gray = if high > low { 255.0 * f64::from((slice.values[i] - low) / (high - low)) } else { 128.0 };
            let pixel = match color(slice.classes[i]).filter(|_| with_classes) {
                Some(RGBColor(r, g, b)) => [r, g, b].map(|c| COVER * f64::from(c) + (1.0 - COVER) * gray),
                None => [gray; 3],
            };
            let [r, g, b] = pixel.map(|v| v as u8);
            area.draw_pixel(((corner.0 + x) as i32, (corner.1 + y) as i32), &RGBColor(r, g, b))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_of_any_shape_are_drawn() {
        let folder = tempfile::tempdir().unwrap();
        let slice = |rows: usize, columns: usize, flat: bool| Slice {
            title: "depth 3".into(),
            rows,
            columns,
            values: (0..rows * columns).map(|i| if flat { 2.0 } else { i as f32 }).collect(),
            classes: (0..rows * columns).map(|i| (i % 3) as i64).collect(),
        };
        let path = folder.path().join("a.png");
        segmentation(&path, &[slice(5, 9, false), slice(1, 400, false), slice(4, 4, true)], 3).unwrap();
        assert!(std::fs::read(&path).is_ok_and(|bytes| bytes.starts_with(b"\x89PNG") && bytes.len() > 4000));
        let message = segmentation(Path::new("/nonexistent/x.png"), &[], 2).unwrap_err().to_string();
        assert!(message.starts_with("/nonexistent/x.png: "), "{message}");
        assert_eq!(color(0), None);
        assert_ne!(color(1), color(2));
    }
}
