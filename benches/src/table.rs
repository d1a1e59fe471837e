//! Rows for people and for programs.

use std::path::Path;

use serde::Serialize;

/// Prints `rows` under their `names`, columns aligned to the right.
pub fn print(names: &[&str], rows: &[Vec<String>]) {
    let width = |i: usize| rows.iter().map(|row| row[i].len()).chain([names[i].len()]).max().unwrap_or(0);
    let widths: Vec<usize> = (0..names.len()).map(width).collect();
    let line = |cells: Vec<&str>| {
        let padded = cells.iter().zip(&widths).map(|(cell, width)| format!("{cell:>width$}"));
        println!("{}", padded.collect::<Vec<_>>().join("  "));
    };
    line(names.to_vec());
    rows.iter().for_each(|row| line(row.iter().map(String::as_str).collect()));
}

/// Writes `rows` to `path` as a JSON list.
///
/// # Errors
/// A message that names the file.
pub fn write(path: &Path, rows: &[impl Serialize]) -> Result<(), String> {
    let text = serde_json::to_vec_pretty(rows).map_err(|error| error.to_string())?;
    std::fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))
}
