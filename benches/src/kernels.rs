//! `bench kernels`: each kernel beside a matrix product of the same process.

use std::path::PathBuf;
use std::time::Instant;

use serde::Serialize;

use crate::cases::{CASES, Case, Pass};
use crate::{median, table};

/// Rows and columns of the matrices of the yard-stick.
const SIZE: usize = 1024;

/// `bench kernels`.
#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// Pairs of a kernel and a matrix product that are timed for each row, in alternation
    #[arg(long, default_value_t = 7)]
    pub pairs: usize,
    /// Threads, one column of shares for each
    #[arg(long, value_delimiter = ',', default_value = "1,2")]
    pub threads: Vec<usize>,
    /// Only cases whose name contains this
    #[arg(long, default_value = "")]
    pub only: String,
    /// Write the rows here
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// One pass of one case with one number of threads.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The case.
    pub name: String,
    /// `forward`, `data` or `weight`.
    pub pass: &'static str,
    /// Threads of the kernel and of the matrix product.
    pub threads: usize,
    /// Billions of operations a second: the median over the pairs.
    pub gflops: f64,
    /// The median of the pairs' ratios to the matrix product.
    pub share_of_matmul: f64,
}

/// Two factors and a product.
struct Matrices {
    a: Vec<f32>,
    b: Vec<f32>,
    c: Vec<f32>,
}

impl Matrices {
    fn new() -> Matrices {
        let values = |seed: usize| (0..SIZE * SIZE).map(|i| ((i * 7919 + seed) % 1000) as f32 / 1000.0).collect();
        Matrices { a: values(1), b: values(2), c: vec![0.0; SIZE * SIZE] }
    }

    fn product(&mut self, threads: usize) {
        let parallelism = if threads == 1 { gemm::Parallelism::None } else { gemm::Parallelism::Rayon(threads) };
        let (n, row) = (SIZE, SIZE as isize);
        let (c, a, b) = (self.c.as_mut_ptr(), self.a.as_ptr(), self.b.as_ptr());
        // SAFETY: three square matrices of SIZE, row by row.
        unsafe { gemm::gemm(n, n, n, c, 1, row, false, a, 1, row, b, 1, row, 0.0, 1.0, false, false, false, parallelism) }
    }
}

fn seconds(work: impl FnOnce()) -> f64 {
    let start = Instant::now();
    work();
    start.elapsed().as_secs_f64()
}

fn measure(case: &Case, pass: Pass, run: &(dyn Fn() + Sync), matrices: &mut Matrices, threads: usize, pairs: usize) -> Row {
    let matmul = 2e-9 * (SIZE * SIZE * SIZE) as f64;
    run();
    matrices.product(threads);
    // Short kernels are repeated, so that a pair's halves take about as long.
    let repeats = (matmul / case.gflop()).ceil().clamp(1.0, 1000.0);
    let pair = || {
        let own = repeats * case.gflop() / seconds(|| (0..repeats as usize).for_each(|_| run()));
        (own, own / (matmul / seconds(|| matrices.product(threads))))
    };
    let (rates, shares): (Vec<f64>, Vec<f64>) = std::iter::repeat_with(pair).take(pairs.max(1)).unzip();
    Row { name: case.name.into(), pass: pass.name(), threads, gflops: median(rates), share_of_matmul: median(shares) }
}

/// Measures, prints and writes.
///
/// # Errors
/// A message for the user.
pub fn run(args: &Args) -> Result<(), String> {
    let mut matrices = Matrices::new();
    let mut rows: Vec<Row> = Vec::new();
    println!(
        "GFLOP/s of each kernel, and as a share of a {SIZE}^3 matrix product (crate gemm{}), median of {} pairs",
        if cfg!(feature = "avx512") { " with AVX-512" } else { "" },
        args.pairs
    );
    for case in CASES.iter().filter(|case| case.name.contains(&args.only)) {
        let ready = case.ready();
        for pass in case.passes() {
            let run = ready.pass(*pass);
            for threads in &args.threads {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(*threads).build().map_err(|error| error.to_string())?;
                rows.push(pool.install(|| measure(case, *pass, &*run, &mut matrices, *threads, args.pairs)));
            }
        }
    }
    if rows.is_empty() {
        return Err(format!("no case is named like {:?}", args.only));
    }
    let cells = |row: &Row| {
        let numbers = [format!("{:.1}", row.gflops), format!("{:.2}", row.share_of_matmul)];
        [vec![row.name.clone(), row.pass.into(), row.threads.to_string()], numbers.into()].concat()
    };
    table::print(&["case", "pass", "threads", "GFLOP/s", "of matmul"], &rows.iter().map(cells).collect::<Vec<_>>());
    args.json.as_ref().map_or(Ok(()), |path| table::write(path, &rows))
}
