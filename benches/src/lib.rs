//! Benchmarks: kernels beside a matrix product, training steps beside each other. They print ratios of one run, since
//! times of different runs, on machines that others use too, do not compare.
#![warn(missing_docs)]

pub mod cases;
pub mod kernels;
pub mod step;
pub mod table;
pub mod totals;

/// The median; 0 of nothing.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => 0.0,
        n if n % 2 == 1 => values[n / 2],
        n => 0.5 * (values[n / 2 - 1] + values[n / 2]),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn medians() {
        assert_eq!(super::median(vec![]), 0.0);
        assert_eq!(super::median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(super::median(vec![4.0, 1.0, 2.0, 3.0]), 2.5);
    }
}
