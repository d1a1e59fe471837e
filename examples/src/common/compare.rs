//! One training step, written down: to compare grids.

use std::collections::BTreeMap;
use std::path::Path;

use burn::module::AutodiffModule;
use burn::tensor::DType;
use burn::tensor::backend::Backend as _;
use burn_spatial_io::{check_ids, whole_file};
use burn_spatial_models::weights::{self, Named};

use super::checkpoint::{Schedule, State};
use super::cli::StepArgs;
use super::data::{Scaling, make_folder_of};
use super::ranks::{Rank, on_all, on_first};
use super::training::Task;
use super::{Backend, Error};

/// Writes loss, gradients and running statistics of the first step of `task` (safetensors), and prints the largest
/// relative difference to such a file of another grid: the same weights and batch on every grid. Collective: rank 0
/// writes.
///
/// # Errors
/// When data cannot be read, the file not written, or the other file holds another step.
pub fn step<T: Task>(rank: &Rank, task: &T, (setup, scaling): (T::Setup, Scaling), seed: u64, args: &StepArgs) -> Result<(), Error> {
    make_folder_of(rank, &args.out)?;
    if let Some(other) = &args.against {
        on_first(rank.world(), || std::fs::File::open(other).map(drop).map_err(Error::io(other)))?;
    }
    Backend::seed(&rank.device, seed);
    let mut model = on_all(rank.world(), T::model(&setup, &rank.device))?;
    if args.float64 {
        let named = weights::collect(&model).into_iter().map(|(name, data)| (name, data.convert_dtype(DType::F64)));
        model = weights::load(model, &named.collect())?;
    }
    let state = State::new::<T>(setup, scaling, Schedule::new(), 0);
    let mut step = Named::new();
    if let Some(batch) = task.batches(&state).next() {
        let batch = batch?;
        check_ids(T::ids(&batch), &rank.mesh)?;
        let loss = task.loss(&model, if args.float64 { T::float64(batch) } else { batch });
        let gradients = loss.backward();
        let gradients = weights::gradients(&model, &gradients).into_iter();
        step.extend(gradients.map(|(name, data)| (format!("gradient/{name}"), data)));
        let statistics = weights::collect(&model.valid()).into_iter().filter(|(name, _)| name.contains("running_"));
        step.extend(statistics.map(|(name, data)| (format!("statistic/{name}"), data)));
        step.insert("loss".into(), loss.into_data());
    }
    let write = |partial: &Path| weights::write_safetensors(partial, &step).map_err(Error::from);
    on_first(rank.world(), || whole_file(&args.out, write, Error::io(&args.out)))?;
    if let Some(other) = &args.against {
        let largest = on_first(rank.world(), || {
            let differences = differences(&step, &weights::read_safetensors(other, "")?)?;
            let largest = differences.into_iter().max_by(|a, b| a.1.total_cmp(&b.1));
            largest.ok_or_else(|| Error::Usage("there is nothing to compare".into()))
        })?;
        if rank.is_first() {
            println!("largest relative difference {:.3e}, in {}", largest.1, largest.0);
        }
    } else if rank.is_first() {
        println!("loss, gradients and running statistics of one step in {}; --against compares another grid", args.out.display());
    }
    Ok(())
}

/// For each tensor, the largest difference of its entries relative to its largest entry.
///
/// # Errors
/// [`Error::Usage`] when the tensors differ in name or shape.
pub fn differences(one: &Named, other: &Named) -> Result<BTreeMap<String, f64>, Error> {
    let shapes = |named: &Named| named.iter().map(|(name, data)| (name.clone(), data.shape.to_vec())).collect::<Vec<_>>();
    if shapes(one) != shapes(other) {
        return Err(Error::Usage("the two steps are of different networks".into()));
    }
    let difference = |(name, data): (&String, _)| {
        let (a, b): (&burn::tensor::TensorData, _) = (data, &other[name]);
        let largest = a.iter::<f64>().chain(b.iter::<f64>()).fold(0.0, |m: f64, v| m.max(v.abs()));
        let apart = a.iter::<f64>().zip(b.iter::<f64>()).fold(0.0, |m: f64, (a, b)| m.max((a - b).abs()));
        (name.clone(), if largest > 0.0 { apart / largest } else { 0.0 })
    };
    Ok(one.iter().map(difference).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::TensorData;

    #[test]
    fn differences_are_relative_to_the_largest_entry() {
        let named = |values: [f32; 3]| Named::from([("a".to_owned(), TensorData::from(values))]);
        let found = differences(&named([1.0, -4.0, 0.0]), &named([1.0, -4.0, 1.0])).unwrap();
        assert_eq!(found["a"], 0.25);
        assert_eq!(differences(&named([0.0; 3]), &named([0.0; 3])).unwrap()["a"], 0.0);
        let other = Named::from([("b".to_owned(), TensorData::from([1.0f32]))]);
        assert!(differences(&named([0.0; 3]), &other).is_err());
    }
}
